"""Scripts and manifests that start a run on the clusters of other schedulers."""
