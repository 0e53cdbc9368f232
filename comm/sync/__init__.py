"""The arithmetic of the modes of `comm.sync` other than ssgd: averages of models, and their meetings."""
