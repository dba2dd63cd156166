"""Pure decisions: values in, values out, the standard library only. No clock, no socket, no tensor, no log."""
