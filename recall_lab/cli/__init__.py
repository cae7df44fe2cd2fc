"""The verbs of the command line, a module each: `recall-lab run`, `recall-lab probe` and so on."""
