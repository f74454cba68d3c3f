"""What ``foreprop doctor`` runs: does the network, and what is installed, let these hosts train?

A `probe` on every host gathers its host's `facts` and makes `traffic`. `examine` says who measures
what and when, over a `panel`, which is either `hosts` (started as ``foreprop run`` starts things)
or `ranks` (torchrun's, in its store). `findings` decides what the results mean, and is pure;
`show` prints.
"""
