"""What a node does beside its main loop, one duty a file.

state     what the duties share: who the node is, how far it has come, whom it knows
waits     where waits are made: each has a name
telling   what the node tells of itself
watch     announces the node and reads the membership
arrival   chooses a stage, waits for the others, takes up a run that has begun
weights   takes the weights that the node begins with from where they are
moving    decides to go to another stage
answers   what peers ask, and which duty answers
origin    at stage 0: begins microbatches
routes    sends on: one output to replicas of the next stage until one answers
door      at later stages: admits and serves microbatches
examiner  at later stages: serves held-out microbatches
clock     moves the step
rounds    outer rounds
donor     lends this replica's state to newcomers
guardian  holds the weights of other stages that have few replicas
saving    writes checkpoints, hands the weights over before leaving
ending    evaluation, and the end of the run
"""
