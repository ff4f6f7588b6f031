"""Step time, memory and training speed of our optimizers beside AdamW and others.

    adamo-lab bench resnet18 gpt-124m

Every contender is timed in turn with ``torch.optim.AdamW(fused=True)`` on the same parameters, and
the ratio of the two is what counts: absolute times on shared machines are worth little. All have
their rounds in several passes, so that slow seconds of the machine do not fall on one of them.
"""
