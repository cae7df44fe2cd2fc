"""recall_lab: find out what an attention mechanism can remember."""
