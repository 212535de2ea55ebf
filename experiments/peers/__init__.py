"""What the benches share: the machine, the federations that are played, and the same work as plain loops."""
