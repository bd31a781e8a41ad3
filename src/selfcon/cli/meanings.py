"""What each setting is, in a phrase, for `--help-all`."""

from __future__ import annotations

_SCHEDULE = {
    "kind": "how the learning rate falls",
    "warmup_epochs": "epochs in which it rises; None: 10 or a fifth, for batches of 1024 or more and long pretrainings",
    "warmup_from": "where it rises from",
    "floor": "what it falls to, as a part of the highest",
    "milestones": "of step: where it drops, as parts of the whole",
    "gamma": "of step: what it is multiplied by there",
}
_AUGMENT = {
    "policy": "none, simple (crop, mirror), standard (colours, too), randaugment, randaugment-simple or -standard,"
    " or one that a script added",
    "scale": "least and largest share of an image that a crop takes",
    "flip": "whether images may be mirrored",
    "strength": "times the usual strength of colour changes, 0 to 5",
}
_OPTIM = {
    "name": "the optimiser",
    "momentum": "of the optimiser",
    "nesterov": "look ahead along the momentum",
    "weight_decay": "None: 0.05 for adamw, 1e-4 for the others",
    "beta2": "of adamw",
    "clip_norm": "longest gradient; None: any",
}

MEANINGS = {
    "data": "name, folder, .npz or packed file",
    "data_root": "where named data sets lie",
    "class_list": "for imagenet100: a file with one class a line",
    "bad_images": "what happens at an image that cannot be read",
    "val_fraction": "share of the training images held out",
    "image_size": "side in pixels; None: what the images have",
    "stream": "read images while training; None: if they are large or many",
    "limit_batches": "batches in an epoch, to try a set-up",
    "per_class": "training images of each class, the rest is left out",
    "imbalance": "make the smallest class so many times smaller",
    "sampler": "balanced: every class equally often",
    "model": "a network of selfcon or timm",
    "width": "share of its channels",
    "stem": "for small or large images; None: by the image size",
    "exits": "stage:structure of sub-networks, such as 2:fc,3:same",
    "norm": "which normalisation",
    "projection_dim": "features that are contrasted",
    "weights": "weights to begin with: a file, a run, or timm",
    "method": "ce, ce-sub, sd, selfcon, selfcon-1stage, selfcon-m, selfcon-m-star, selfcon-mu, selfcon-mu-star, "
    "selfcon-star, selfcon-su, selfcon-su-star, simclr, supcon, supcon-s",
    "epochs": "times through the training images",
    "batch_size": "images in a step",
    "micro_batch": "of them, how many are in the network at a time",
    "cutmix": "share of the batches whose images get a box of another image",
    "lr": "learning rate; None: what suits optimiser and batch",
    "seed": "of everything that is drawn",
    "precision": "of the network's arithmetic",
    "sync_bn": "normalise over all processes; None: if each sees fewer than 128 images",
    "ema": "average of the weights that is kept, such as 0.999",
    "keep_epochs": "epochs whose encoder is kept",
    **{f"optim.{name}": text for name, text in _OPTIM.items()},
    **{f"schedule.{name}": text for name, text in _SCHEDULE.items()},
    "loss.temperature": "of the contrast",
    "loss.learn_temperature": "whether it is learnt, from there on",
    "loss.alpha": "weight of the second term, of methods that have one",
    "loss.base_temperature": "0.07: the scale of the paper's code",
    "loss.implementation": "who computes it; all give the same",
    "loss.ring": "pass features around instead of gathering them",
    **{f"augment.{name}": text for name, text in _AUGMENT.items()},
    "probe.epochs": "of the linear classifiers; None: 100 at most",
    "probe.batch_size": "images in a step",
    "probe.lr": "None: by the length of the features",
    "probe.momentum": "of SGD",
    "probe.weight_decay": "of SGD",
    **{f"probe.augment.{name}": text for name, text in _AUGMENT.items()},
    **{f"probe.schedule.{name}": text for name, text in _SCHEDULE.items()},
    "watch.knn_every": "epochs between kNN accuracies; 0: never",
    "watch.knn_samples": "images that those are measured on",
    "watch.test_in_probe": "test accuracy in every epoch of the probe; nothing is chosen by it",
}
