"""What runs in vLLM's engine core: the process of the scheduler.

A guided request is made ready when it arrives (arrivals, followers), and begins and ends as a group
(group_scheduler). The scheduler runs its steps (scheduler, snapshot, kv_roles), and outcome.py
shapes what goes back. What changes a step has a module of its own: windows and schedules
(timelines), scores (scoring), recurrent models (states), images and sounds (media), drafts
(speculation), suffixes (suffixes) and the gates that save them (gates).

A group is always on one rank of data parallelism, because its followers are made here, after the
frontend has chosen the rank. Ranks that share experts step together and must call the model equally
often, so on them the drafter never rests.
"""
