"""The path of a microbatch through a node.

source ── train ──▶ dispatch ── propagate ──▶ (wire) ──▶ rpc_handler ──▶ serve ── train ──▶ dispatch ──▶ …
                      │  ▲                                                 │
              forward │  │ backward                                        │ admission: one inner step
                      ▼  │                                                 ▼
                    the device                                           core/intake
"""
