"""Training of a head: what it computes, and that a run can be stopped and gone on with."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from eagle3_heads import PlainDrafter
from tiny_models import write_hf

from common.model.config import ModelConfig
from common.model.eagle3_checkpoint import read_eagle3
from common.model.eagle3_config import Eagle3Config
from common.model.layers import RmsNorm
from common.model.load import open_checkpoint
from training.__main__ import split, written_head
from training.batches import Schedule, pack
from training.evaluation import is_greedy, reach
from training.head import PARAMETERS, TrainableHead, initial_weights
from training.loss import Teacher, soft_cross_entropy
from training.shards import DataError, Example, read_shard, shard_paths, write_shard
from training.trainer import HEAD_FOLDER, METRICS_FILE, Pace, Trainer, TrainPlan, frequent_ids

AUX = 3
PLAN = TrainPlan(steps=12, batch=24, unroll=3, learning_rate=3e-3, seed=5)
QUIET = Pace(depth=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    write_hf("smollm2", directory)
    return open_checkpoint(directory)


def head_config(target: ModelConfig) -> Eagle3Config:
    return Eagle3Config(
        vocab_size=target.vocab_size,
        draft_vocab_size=60,
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        rms_eps=target.rms_eps,
        rope=target.rope,
        max_context=target.max_context,
        aux_layers=(0, 1, 1),
    )


def written(target: ModelConfig, seed: int, prompt: int = 6, answer: int = 9) -> Example:
    """A sequence with random states, whose ids follow one another in a way that can be learned."""

    generator = torch.Generator().manual_seed(seed)
    length = prompt + answer
    ids = (int(torch.randint(40, (), generator=generator)) + 7 * torch.arange(length)) % 50
    mask = torch.arange(length) >= prompt
    top = torch.cat([ids[1:], torch.tensor([-1])])
    hidden = target.hidden_size
    states = torch.randn(length, (AUX + 1) * hidden, generator=generator)
    states[:, 0] = ids / 10
    return Example(ids, mask, top, states.bfloat16(), f"turn {seed}", "open")


def trainable(checkpoint, dtype: torch.dtype = torch.float32) -> TrainableHead:
    config = head_config(checkpoint.config)
    ids = torch.arange(0, 120, 2)
    weights = initial_weights(config, checkpoint, ids, seed=3)
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    return TrainableHead(config, weights, embedding=embedding, target_ids=ids, dtype=dtype)


def test_an_unrolled_step_is_what_drafting_step_by_step_computes(checkpoint):
    head = trainable(checkpoint)
    sequences = [written(checkpoint.config, 1), written(checkpoint.config, 2, prompt=3, answer=14)]
    steps = 4
    batch = pack(sequences, steps, head.config.aux_size)
    outputs = head(batch, steps)
    weights = head.weights(torch.float32)
    embedding = head.embedding
    for one, span in zip(sequences, batch.spans, strict=True):
        first = int(torch.nonzero(one.answer)[0]) - 2
        assert span.loss.stop - span.loss.start == one.ids.shape[0] - 2 - first
        for at in range(first, one.ids.shape[0] - 2):
            plain = PlainDrafter(head.config, weights, embedding)
            for position in range(at + 1):
                feature = plain.fuse(one.states[position, : head.config.aux_size].float())
                logits, feature = plain.step(feature, int(one.ids[position + 1]), position)
            for step in range(steps):
                if at + step + 2 >= one.ids.shape[0]:
                    assert batch.teacher[step, span.loss.start + at - first] == -1
                    break
                got = F.linear(outputs[step][span.loss.start + at - first], head.lm_head)
                torch.testing.assert_close(got, logits, rtol=1e-3, atol=1e-4)
                if at + step + 2 < one.ids.shape[0]:
                    logits, feature = plain.step(feature, int(one.ids[at + step + 2]), at + step + 1)


def test_rows_that_stop_drafting_change_nothing_for_those_that_go_on(checkpoint):
    head = trainable(checkpoint)
    sequences = [written(checkpoint.config, seed) for seed in range(3)]
    batch = pack(sequences, 3, head.config.aux_size)
    whole = head(batch, 3)
    unrolled = head.unroll(batch)
    unrolled.step()
    unrolled.keep(torch.tensor([1, 2, 5, 20, 21]))
    torch.testing.assert_close(unrolled.step(), whole[1][[1, 2, 5, 20, 21]])
    unrolled.keep(torch.tensor([0, 3]))
    assert unrolled.live.tolist() == [1, 20]
    torch.testing.assert_close(unrolled.step(), whole[2][[1, 20]])


def test_ids_are_rotated_once_more_at_every_step(checkpoint):
    one = written(checkpoint.config, 4, prompt=5, answer=4)
    batch = pack([one], 3, AUX * checkpoint.config.hidden_size)
    assert batch.loss_rows.tolist() == [3, 4, 5, 6]
    assert batch.next_ids.tolist() == one.ids[1:8].tolist()
    assert batch.step_ids[0].tolist() == one.ids[[4, 5, 6, 7]].tolist()
    assert batch.step_ids[1].tolist() == one.ids[[5, 6, 7, 8]].tolist()
    assert batch.step_ids[2].tolist()[:2] == one.ids[[6, 7]].tolist()
    assert batch.ids.tolist() == one.ids[[5, 6, 7, 8]].tolist()
    assert batch.top.tolist() == one.top[[4, 5, 6, 7]].tolist()
    assert batch.teacher.tolist() == [[0, 1, 2, 3], [1, 2, 3, -1], [2, 3, -1, -1]]


def test_the_loss_is_cross_entropy_over_the_draft_vocabulary(checkpoint):
    generator = torch.Generator().manual_seed(0)
    norm = RmsNorm(1 + torch.rand(12, generator=generator), 1e-5)
    rows = torch.randn(7, 12, generator=generator)
    final = torch.randn(5, 12, generator=generator)
    teacher = Teacher(norm, rows, torch.empty(0))
    chances = teacher.chances(final)
    torch.testing.assert_close(chances, F.softmax(norm(final) @ rows.T, -1))
    outputs = torch.randn(9, 8, generator=generator).requires_grad_()
    head = torch.randn(7, 8, generator=generator).requires_grad_()
    index = torch.tensor([0, 4, 4, 2, 1, 3, 0, 2, 1])
    loss, best = soft_cross_entropy(outputs, head, chances, index)
    got = torch.autograd.grad(2 * loss, [outputs, head])
    logits = outputs @ head.T
    expected = F.cross_entropy(logits, chances[index], reduction="sum")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(got, torch.autograd.grad(2 * expected, [outputs, head]))
    assert best.tolist() == logits.argmax(-1).tolist()


def trainer(
    checkpoint, out: Path, sequences: list[Example], plan: TrainPlan = PLAN, ids: torch.Tensor | None = None
) -> Trainer:
    config = head_config(checkpoint.config)
    ids = torch.arange(60) if ids is None else ids
    start = initial_weights(config, checkpoint, ids, plan.seed)
    return Trainer(config, checkpoint, ids, start, sequences, sequences[:3], plan, out, dtype=torch.float32)


def parameters(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: run.head.parameter(name).detach().clone() for name in PARAMETERS}


def test_positions_outside_the_draft_vocabulary_teach_nothing(checkpoint, tmp_path):
    """What the target chose there may be anything outside, and its state at that place too."""

    sequences = [written(checkpoint.config, seed) for seed in range(6)]
    at = 8  # the target's choice here is outside; the ids themselves stay
    changed = []
    for number, one in enumerate(sequences):
        top, states = one.top.clone(), one.states.clone()
        top[at] = 100
        other = states.clone()
        other[at, -checkpoint.config.hidden_size :] = number
        changed.append((replace(one, top=top), replace(one, top=top, states=other)))
    runs = [trainer(checkpoint, tmp_path / str(n), [pair[n] for pair in changed]) for n in range(2)]
    for run in runs:
        run._train([0, 1, 2, 3])
    first, second = map(parameters, runs)
    assert all(torch.equal(first[name], second[name]) for name in PARAMETERS)


def test_training_lowers_the_loss_and_lengthens_the_reach(checkpoint, tmp_path):
    embedding = checkpoint.tensor("model.embed_tokens.weight").bfloat16()
    sequences = []
    for seed in range(4):
        one = written(checkpoint.config, seed)
        # The output rows are the embedding's, so that this state makes the target choose `top`.
        states = torch.cat([one.states[:, : -embedding.shape[1]], embedding[one.top]], dim=-1)
        sequences.append(replace(one, states=states))
    run = trainer(checkpoint, tmp_path, sequences, replace(PLAN, steps=80))
    before = reach(run.head, sequences[:3], 3)
    losses = [run._train([0, 1, 2, 3])[0] for _ in range(80)]
    after = reach(run.head, sequences[:3], 3)
    assert losses[-1] < 0.7 * losses[0]
    assert after.by_position[0] > before.by_position[0] + 0.3
    assert after.tokens_per_step > before.tokens_per_step + 0.3


def test_a_run_that_was_stopped_ends_with_the_same_weights(checkpoint, tmp_path):
    sequences = [written(checkpoint.config, seed) for seed in range(8)]
    whole = trainer(checkpoint, tmp_path / "whole", sequences)
    whole.run(threading.Event(), QUIET)
    stop = threading.Event()
    half = trainer(checkpoint, tmp_path / "half", sequences)
    train = half._train

    def then_stop(chosen):
        if half.step == 4:
            stop.set()
        return train(chosen)

    half._train = then_stop
    assert half.run(stop, QUIET) is None
    assert half.step == 5
    again = trainer(checkpoint, tmp_path / "half", sequences)
    assert again.step == 5
    assert again.run(threading.Event(), QUIET) is not None
    ours, theirs = parameters(again), parameters(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in PARAMETERS)
    assert ours["fc"].ne(initial_weights(whole.head.config, checkpoint, torch.arange(60), 5)["fc"]).any()


def test_a_checkpoint_of_other_settings_is_refused(checkpoint, tmp_path):
    sequences = [written(checkpoint.config, seed) for seed in range(4)]
    run = trainer(checkpoint, tmp_path, sequences)
    run._train([0, 1])
    run.save()
    with pytest.raises(DataError, match="other settings or data"):
        trainer(checkpoint, tmp_path, sequences, replace(PLAN, learning_rate=1e-4))
    with pytest.raises(DataError, match="other settings or data"):
        trainer(checkpoint, tmp_path, sequences[:2])
    with pytest.raises(DataError, match="other settings or data"):
        trainer(checkpoint, tmp_path, sequences, ids=torch.arange(1, 61))


def test_the_head_that_is_written_is_the_one_that_was_trained(checkpoint, tmp_path):
    sequences = [written(checkpoint.config, seed) for seed in range(4)]
    run = trainer(checkpoint, tmp_path, sequences, replace(PLAN, steps=3))
    run.run(threading.Event(), QUIET)
    config, weights = read_eagle3(tmp_path / HEAD_FOLDER)
    assert config == run.head.config
    assert torch.equal(weights.qkv, run.head.parameter("qkv").detach().bfloat16())
    assert weights.target_ids.tolist() == list(range(60))
    assert (tmp_path / METRICS_FILE).read_text().count('"reach"') == 1


def test_a_written_head_can_be_begun_with(checkpoint, tmp_path):
    sequences = [written(checkpoint.config, seed) for seed in range(4)]
    run = trainer(checkpoint, tmp_path, sequences, replace(PLAN, steps=3), ids=torch.arange(1, 121, 2))
    run.run(threading.Event(), QUIET)
    wanted = replace(run.head.config, draft_vocab_size=8, intermediate_size=8)
    config, ids, start = written_head(tmp_path / HEAD_FOLDER, wanted)
    assert config == run.head.config
    assert ids.tolist() == list(range(1, 121, 2))
    assert all(torch.equal(start[name], run.head.parameter(name).bfloat16()) for name in PARAMETERS)
    with pytest.raises(DataError, match="another target or form"):
        written_head(tmp_path / HEAD_FOLDER, replace(wanted, aux_layers=(0, 0, 1)))


def test_the_first_head_is_the_targets_own_end(checkpoint):
    config = head_config(checkpoint.config)
    weights = initial_weights(config, checkpoint, torch.arange(60), seed=0)
    hidden = config.hidden_size
    aux = torch.randn(2, AUX * hidden)
    torch.testing.assert_close(
        F.linear(aux, weights["fc"])[:, :4], aux[:, -hidden:][:, :4], atol=0.1, rtol=0.1
    )
    assert torch.equal(weights["lm_head"], checkpoint.tensor("model.embed_tokens.weight")[:60])
    other = initial_weights(replace(config, hidden_size=32, head_dim=8), checkpoint, torch.arange(60), 0)
    assert other["fc"].shape == (32, AUX * hidden)


def test_the_draft_vocabulary_is_what_answers_use_most(checkpoint):
    one = written(checkpoint.config, 0)
    ids = torch.tensor([9, 9, 9, 9, 5, 7, 5, 3])
    answer = torch.arange(8) >= 4
    top = torch.tensor([-1, -1, -1, 5, 7, 5, 8, -1])
    one = replace(one, ids=ids, answer=answer, top=top)
    assert frequent_ids([one], 2, 131).tolist() == [5, 7]
    assert frequent_ids([one], 5, 131).tolist() == [0, 3, 5, 7, 8]
    assert not is_greedy(one)
    assert is_greedy(replace(one, top=torch.tensor([-1, -1, -1, 5, 7, 5, 3, -1])))


def test_all_answers_to_a_turn_are_on_one_side(checkpoint):
    one = written(checkpoint.config, 0)
    examples = [replace(one, turn=f"turn {n}") for n in range(200)]
    trained, held = split([*examples, *examples])
    turns = [{example.turn for example in side} for side in (trained, held)]
    assert not turns[0] & turns[1]
    assert 2 <= len(turns[1]) <= 20
    assert len(trained) + len(held) == 400


def test_every_pass_takes_every_sequence_once_and_can_be_entered_anywhere():
    schedule = Schedule((5, 9, 3, 7, 7, 2, 8), batch=12, seed=1)
    steps = schedule.epoch(0)
    assert sorted(index for step in steps for index in step) == list(range(7))
    assert schedule.epoch(1) != steps
    whole = schedule.from_step(0)
    expected = [next(whole) for _ in range(2 * len(steps) + 3)]
    for start in (1, len(steps), 2 * len(steps) + 1):
        assert next(schedule.from_step(start)) == expected[start]


def test_shards_come_back_as_they_were_written(checkpoint, tmp_path):
    sequences = [written(checkpoint.config, seed, prompt=4 + seed) for seed in range(3)]
    write_shard(tmp_path, sequences[:2], model="m", layers=(0, 1))
    write_shard(tmp_path, sequences[2:], model="m", layers=(0, 1))
    read = [one for path in shard_paths(tmp_path) for one in read_shard(path, model="m", layers=(0, 1))]
    for ours, theirs in zip(sequences, read, strict=True):
        assert (ours.turn, ours.kind) == (theirs.turn, theirs.kind)
        for name in ("ids", "answer", "top", "states"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
    path = shard_paths(tmp_path)[0]
    for model, layers, said in (("n", (0, 1), "another model"), ("m", (0, 2), "states of layers")):
        with pytest.raises(DataError, match=said):
            list(read_shard(path, model=model, layers=layers))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="not a readable shard"):
        list(read_shard(path, model="m", layers=(0, 1)))
