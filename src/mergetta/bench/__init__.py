"""Compare methods: suites, protocol, result store, tables, figures, report. Needs the extras torch and bench."""
