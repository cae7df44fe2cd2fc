"""The claims of the argument: each is a pure function of the table of its experiments, and gives a verdict."""
