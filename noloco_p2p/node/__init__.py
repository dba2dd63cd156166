"""The life of a node. Read it in this order.

loop            the main loop, in run order
state           who the node is, how far it has come, and its waits
membership      what it knows of the others, and the task that speaks to the directory
waits           what it waits for: every wait has a name
join            chooses a stage, waits for the others, goes on with a run that has begun; moves to another stage
restore         takes the weights that the node begins with from where they are
pipeline/       the way of a microbatch
    source      at stage 0: reads microbatches and begins them
    dispatch    at every stage: forward, on through the next stage, backward
    serve       at later stages: admits microbatches and answers them
rpc_handler     what peers ask, and which duty answers
outer_round     outer rounds, and the snapshots that partners pull
state_donor     lends this replica's state to newcomers
guardian        holds the weights of other stages that have few replicas
checkpointing   writes checkpoints, hands the weights over before leaving
shutdown        evaluation, and the end of the run

`state` and `membership` are shared by all the others, which are duties: each takes what it uses when it is
made, and changes shared state only by its owner's methods.
"""
