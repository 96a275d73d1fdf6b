"""Prints what MosaicML's own library reads from a folder of shards, a JSON line for each sample, in their order: of
bytes and of a picture's pixels the SHA-256."""

import hashlib
import json
import sys

import numpy as np
from PIL import Image
from streaming import StreamingDataset


def plain(value):
    if isinstance(value, Image.Image):
        value = np.asarray(value.convert("RGB")).tobytes()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return value.item() if isinstance(value, np.generic) else value


dataset = StreamingDataset(local=sys.argv[1], batch_size=1, shuffle=False)
for number in range(len(dataset)):
    print(json.dumps({name: plain(value) for name, value in dataset[number].items()}, sort_keys=True))
