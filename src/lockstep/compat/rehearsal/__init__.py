"""``lockstep run --device cpu``: what a script says of CUDA is answered by this machine's CPU.

Two layers. *Replacements* (`entries`: factories, moving, calls, streams, memory, ...) make a script run: they stand in
torch's own namespaces, so that they hold in every thread, in backward and in loader workers. A *mode* (`follow`) only
hands on which device a tensor says it is on, from arguments to results; where it does not reach, tensors say ``cpu``.
Measured on torch 2.13: 2 us for each call into torch.
"""
