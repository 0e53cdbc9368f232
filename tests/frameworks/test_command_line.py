"""`kfuse data=hf model=hf` trains as a loop by hand does, with the same bits on any workers, and says what is wrong."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from elastic_job import Job, run_job, words
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "</s>", *(f"w{k}" for k in range(30))]
BLOCK = 12
TRAINING = words(
    f"model=hf data.block_size={BLOCK} data.heldout_split=validation train.steps=6 train.epochs=null policy=none",
    "batch.size=12 batch.micro=4 optimizer=sgd lr.base=0.1 workers.max=2",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer, `model`, and `data`: a file of texts with their class for each split.

    `dropout` is the model's configuration with dropout, and the tokenizer.
    """
    folder = tmp_path_factory.mktemp("hf")
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, attention_dropout=0.0, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    config.attention_dropout = 0.2
    config.save_pretrained(folder / "dropout")
    for name in ("model", "dropout"):
        fast.save_pretrained(folder / name)
    (folder / "data").mkdir()
    draws = random.Random(0)
    for split, count in (("train", 1300), ("validation", 40)):  # more than one batch of `datasets`
        rows = [
            {"text": " ".join(draws.choices(WORDS[2:], k=draws.randint(0, 20))), "label": k % 3, "score": 0.5}
            for k in range(count)
        ]
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(place: Path, directory: Path, *overrides: str) -> Job:
    job = run_job(directory, [*TRAINING, f"data.name={place / 'data'}", f"model.name={place / 'model'}", *overrides])
    assert job.error is None, job.told()
    return job


def test_it_trains_as_a_loop_by_hand_does(place: Path, tmp_path: Path) -> None:
    job = run(place, tmp_path / "run", "optimizer.momentum=0.5")
    tokens = []
    for split in ("train", "validation"):
        texts = [json.loads(line)["text"] for line in (place / "data" / f"{split}.jsonl").open()]
        tokens.append(torch.tensor([WORDS.index(word) for text in texts for word in [*text.split(), "</s>"]]))
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    def loss(tokens: torch.Tensor, blocks: list[int]) -> torch.Tensor:
        ids = torch.stack([tokens[k * BLOCK : (k + 1) * BLOCK + 1] for k in blocks])
        return F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())

    for record in job.metrics:
        mean = loss(tokens[0], [k for entry in job.ledger if entry["step"] == record["step"] for k in entry["indices"]])
        mean.backward()
        opt.step()
        opt.zero_grad()
        assert record["loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert len(job.metrics) == 6 and {k for entry in job.ledger for k in entry["indices"]} - {*range(100)}
    held = loss(tokens[1], [*range((len(tokens[1]) - 1) // BLOCK)])
    assert job.summary["heldout_loss"] == pytest.approx(held.item(), rel=1e-5)
    saved = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", ["", "data.label=label"])
def test_the_bits_are_those_of_one_worker(task: str, place: Path, tmp_path: Path) -> None:
    same = words(
        task, f"model.name={place / 'dropout'} model.pretrained=false comm=reproducible checkpoint.every_steps=3"
    )
    one = run(place, tmp_path / "one", *same)
    run(place, tmp_path / "two", *same, "workers.count=2", "train.steps=3")
    two = run(place, tmp_path / "on", *same, "workers.count=2", f"checkpoint.resume={tmp_path / 'two'}")
    for name in ("params_sha256", "heldout_loss", "heldout_accuracy"):
        assert one.summary[name] == two.summary[name], name


WRONG = [
    ("data.name=nope.jsonl", "data.name=nope.jsonl: no such file or folder"),
    ("data.name=no/hub", "data.name=no/hub, split train: ConnectionError: Couldn't reach 'no/hub' on the Hub"),
    ("data.split=test", "split test: ValueError: Unknown split"),
    ("data.text=body", "has no such column; it has text, label, score"),
    ("data.text=label", "data.text=label: must be a column of texts"),
    ("data.label=score", "data.label=score: must be a column of texts, or of whole numbers from 0"),
    ("data.tokenizer=./nope", "data.tokenizer=./nope: no such folder"),
    ("model.name=./nope data.tokenizer={model}", "model.name=./nope: no such folder"),
    ("data.block_size=33", "takes 32 tokens at most"),
    ("data.block_size=100000", "too short for block_size=100000"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_what_is_wrong_is_said_in_one_line(
    wrong: str, says: str, place: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    given = {"data.name": place / "data", "model.name": place / "model"}
    given |= dict(word.split("=") for word in wrong.format(model=place / "model").split())
    status, _, err = command("model=hf", "workers.count=2", *(f"{key}={value}" for key, value in given.items()))
    assert status == 2 and err.startswith("kfuse: error: ") and err.count("\n") == 1 and says in err, err


def test_a_missing_package_is_named(
    place: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    status, _, err = command("data=hf", "data.name=x", "workers.count=2")
    assert status == 2 and "data=hf needs datasets (pip install 'kfuse[transformers]')" in err, err
