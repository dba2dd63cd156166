"""Pure decisions: values in, values out. No clock, no sockets, no tensors, no logging."""
