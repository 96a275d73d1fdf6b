"""Two tiny models, one of a hostile name, and a queue that draws with them."""

import pytest
from documented import DocumentedClient
from flask import Flask
from small_weights import small_weights

import ppldm
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.inference.serving.api import make_api
from ppldm.inference.serving.jobs import Pictures, Queue
from ppldm.inference.serving.paint import Painter
from ppldm.weights.write import write_weights

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def every_answer_is_as_the_document_says(monkeypatch):
    monkeypatch.setattr(Flask, "test_client_class", DocumentedClient)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    found = {}
    for number, name in enumerate(("first", HOSTILE)):
        folder = tmp_path_factory.mktemp("model") / "model"
        weights = small_weights(4 + number)
        weights.tokenizer = CaptionTokenizer(build_vocab(["a red heart"]), 77)
        write_weights(weights, "ppdiffusers", folder)
        found[name] = ppldm.load(folder)
    return found


@pytest.fixture(scope="session")
def painter(models):
    return Painter(models)


@pytest.fixture
def queue(painter):
    queue = Queue(painter.draw, Pictures(), most_waiting=400)
    yield queue
    for job in queue.jobs():
        queue.cancel(job)
    queue.stop()


@pytest.fixture
def client(painter, queue):
    return make_api(painter, queue, page=True).test_client()
