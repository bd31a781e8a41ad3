"""What a trained network is worth: accuracy by exit and of the ensemble, nearest neighbours."""
