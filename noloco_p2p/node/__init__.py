"""The life of a node. Read it in this order.

loop            the main loop, in run order
state           who the node is, how far it has come, and its waits
membership      what it knows about the other nodes; directory_loop is the task that talks to the directory
waits           what it waits for: every wait has a name
join            chooses a stage, waits for the others, enters a run that has begun; moves to another stage
restore         loads the weights that the node starts with, from wherever they are
pipeline/       the path of a microbatch
    source      at stage 0: reads microbatches and starts them
    dispatch    at every stage: forward, through the next stage, backward
    serve       at later stages: admits microbatches and answers them
rpc_handler     routes each call of a peer to the duty that answers it
outer_round     outer rounds, and the snapshots that partners pull
state_donor     lends this replica's state to newcomers
guardian        holds the weights of other stages that have few replicas
checkpointing   writes checkpoints, hands the weights over before leaving
shutdown        evaluation, and the end of the run

All the others share `state` and `membership`. They are the node's duties: each receives what it uses in its
constructor, and changes shared state only through the methods of its owner.
"""
