"""What the scheduling policy does, seen in virtual time: a scripted runner instead of a model."""
