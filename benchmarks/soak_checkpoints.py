def fuzz(kills, seed, console):
    raise NotImplementedError
