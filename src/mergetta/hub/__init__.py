"""The server that collects experts and hands out bundles."""
