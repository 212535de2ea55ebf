"""The commands of the program `fcljax`, a module for each kind."""
