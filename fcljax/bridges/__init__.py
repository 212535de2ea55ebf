"""The same methods under other frameworks. Nothing else in the package knows of them."""
