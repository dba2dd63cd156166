"""Everything for which a node uses torch: a stage of the model, its device thread, its outer state."""
