"""Methods that back-propagate: what strong devices run, how experts are made, and the bar to reach. Needs torch."""
