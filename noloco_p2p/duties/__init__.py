"""What a node does beside its main loop, one duty per file: routes (send on), door (serve), rounds (outer rounds)."""
