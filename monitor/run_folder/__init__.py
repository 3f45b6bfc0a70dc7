"""What a run leaves in its folder: the files that it writes, and the one reader of them all.

`record` and `events` write. To read, begin with `folder` (options, state, a row in a list of runs)
and `reader` (metrics, evaluations and events as they grow). Both serve the page of `penstock watch`
and the commands. They stand on `files` (what may be opened, and how much of it is read), `lines`
(JSON objects, one a line), `columns` (metrics as arrays) and `checkpoints`. The folder itself and
its lock are `penstock.core.run_dir`, as learners hold them too.
"""
