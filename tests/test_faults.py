"""Hostile clients against what a toy method of three numbers sends."""

import json
import shlex

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import COMMON

from fcljax import cli, config
from fcljax.choices import chosen
from fcljax.errors import InputError
from fcljax.federated import faults
from fcljax.federated.attacks import mirror_labels
from fcljax.methods.vfcl.posterior import Posterior
from fcljax.runs import rounds
from fcljax.settings import FaultOptions
from fcljax.types import (
    Batch,
    Broadcast,
    ClientContext,
    ClientInfo,
    Method,
    Phase,
    Program,
    Round,
    Task,
    Upload,
    View,
)

CLASSES = 8
TASK = Task(jnp.array(1), jnp.array([3, 4, 5, -1]), jnp.zeros(CLASSES, bool), jnp.zeros(CLASSES, bool))


def step(context, local, batch, key):
    """The client sees which classes its rows have."""
    del context, key
    return {"labels": batch.label}, {}


def finish(context, local, state):
    gather = {"labels": local["labels"], "held": jnp.array([True, False]), "h": jnp.ones(2, jnp.bfloat16)}
    return Upload(jnp.array([1.0, -2.0]), {"s": jnp.array(3.0), "n": jnp.array(4)}, gather, 30.0), state + 1


PHASE = Phase(View(epochs=1, batch_size=5), step)
PROGRAM = Program(lambda context, state, key: {"labels": jnp.zeros(5, jnp.int32)}, (PHASE, PHASE), finish)
METHOD = Method(
    init=lambda key, frozen: (),
    broadcast=lambda round_context, server: Broadcast(()),
    rounds=(Round(PROGRAM), Round(PROGRAM, who="everyone", when="task_end")),
    predict=lambda round_context, server, batch: jnp.zeros((batch.label.shape[0], CLASSES)),
)
MASK = jnp.array([True, True, True, True, False])


def sent(method: Method, label=(3, 4, 5, 1, 3), task: Task = TASK, which: int = 0, phase: int = 0):
    """What clients 0, 1 and 2 send and keep; one traced function serves all of them."""
    program = method.rounds[which].program
    batch = Batch(jnp.zeros((5, 1, 1, 3)), jnp.array(label), MASK, jnp.arange(5))

    def play(id):
        context = ClientContext(
            (), (), (), task, ClientInfo(id, jnp.array(5), jnp.zeros(CLASSES, jnp.int32), jnp.array(0))
        )
        local = program.start(context, jnp.array(6), jax.random.key(0))
        local, _ = program.phases[phase].step(context, local, batch, jax.random.key(1))
        return program.finish(context, local, jnp.array(6))

    return jax.jit(jax.vmap(play))(jnp.arange(3))


def same(left, right):
    chex.assert_trees_all_equal(left, right)


def of_client(tree, which: int):
    return jax.tree.map(lambda leaf: leaf[which], tree)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("attack, factor", [("sign_flip", -1.0), ("scale", 1e6), ("nan", float("nan"))])
def test_malicious_clients_attack_every_float_that_they_send_in_every_round(attack, factor, which):
    upload, _ = sent(faults.corrupt(METHOD, attack, malicious=2), which=which)
    for client in (0, 1):
        found = of_client(upload, client)
        np.testing.assert_allclose(found.mean, [1.0 * factor, -2.0 * factor], rtol=1e-6)
        np.testing.assert_allclose(found.sum["s"], 3 * factor, rtol=1e-6)
        np.testing.assert_allclose(found.gather["h"].astype(float), [factor] * 2, rtol=1e-2)
        assert found.gather["h"].dtype == jnp.bfloat16


@pytest.mark.parametrize("attack", sorted(set(faults.ATTACKS) - {"weight", "counts"}))
def test_honest_clients_weights_integers_booleans_and_states_stay(attack):
    (upload, state), (honest, same_state) = sent(faults.corrupt(METHOD, attack, malicious=2)), sent(METHOD)
    same(of_client(upload, 2), of_client(honest, 2))
    same(
        (upload.weight, upload.sum["n"], upload.gather["held"]),
        (honest.weight, honest.sum["n"], honest.gather["held"]),
    )
    same(state, same_state)


def test_claims_are_attacked_of_malicious_clients_alone():
    honest, _ = sent(METHOD)
    upload, _ = sent(faults.corrupt(METHOD, "weight", malicious=2))
    assert upload.weight[:2].tolist() == [np.float32(1e30)] * 2
    same(upload._replace(weight=honest.weight.at[:2].set(upload.weight[:2])), upload)
    same(upload._replace(weight=honest.weight), honest)
    upload, _ = sent(faults.corrupt(METHOD, "counts", malicious=2))
    most = jnp.iinfo(upload.sum["n"].dtype).max
    assert np.all(np.asarray(upload.sum["n"][:2]) == most) and np.all(
        upload.sum["n"][2] == honest.sum["n"][2]
    )
    same((upload.mean, upload.weight, upload.gather["h"]), (honest.mean, honest.weight, honest.gather["h"]))


@pytest.mark.parametrize("claim, says", [(1e30, 2**31 - 128), (-1e30, -(2**31)), (7.0, 7)])
def test_a_claim_about_integers_ends_at_their_limits(claim, says):
    """The weight of most methods is a number of examples, so an integer."""

    def finish(context, local, state):
        return Upload(jnp.zeros(2), weight=jnp.asarray(5, jnp.int32)), state

    method = METHOD._replace(rounds=(Round(PROGRAM._replace(finish=finish)),))
    lie = lambda upload, sender: upload._replace(weight=jnp.asarray(claim, jnp.float32))
    upload, _ = sent(faults.corrupt(method, lie, malicious=2))
    assert upload.weight.tolist() == [says, says, 5]


@pytest.mark.long
def test_counts_of_a_method_that_sends_none_are_refused_by_name(tmp_path, capsys):
    for lies in (["--attack", "counts", "--malicious", "1"], ["--faults", "counts=0.2"]):
        assert cli.main(["run", "linear", *COMMON, *lies, "--out", str(tmp_path / "run")]) == 2
        assert "clients of this method send no 'counts'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_claims_of_precision_are_attacked():
    """A Gaussian of a malicious client has a standard deviation of 1e-10, a precision of 1e20."""
    gaussian = Posterior(jnp.ones(2), jnp.full(2, -4.0))
    program = PROGRAM._replace(finish=lambda context, local, state: (Upload(gaussian), state))
    upload, _ = sent(faults.corrupt(METHOD._replace(rounds=(Round(program),)), "counts", malicious=2))
    np.testing.assert_allclose(upload.mean.sigma[:2], 1e-10, rtol=0.1)
    same(of_client(upload.mean, 2), gaussian)
    same(upload.mean.mean, jnp.ones((3, 2)))


@pytest.mark.long
def test_a_client_that_is_certain_sends_noise_and_claims_precision(tmp_path, capsys):
    """Its standard deviations are as small as VFCL's server takes them for possible."""
    gaussian = Posterior(jnp.ones(2), jnp.array([-4.0, 30.0]))
    program = PROGRAM._replace(finish=lambda context, local, state: (Upload(gaussian), state))
    upload, _ = sent(faults.corrupt(METHOD._replace(rounds=(Round(program),)), "certain", malicious=2))
    np.testing.assert_allclose(upload.mean.sigma[:2], [gaussian.sigma / 9.9] * 2, rtol=1e-5)
    assert np.abs(np.asarray(upload.mean.mean[:2]) - 1).min() > 1e-3
    same(of_client(upload.mean, 2), gaussian)
    for lies in (["--attack", "certain", "--malicious", "1"], ["--faults", "certain=0.2"]):
        assert cli.main(["run", "linear", *COMMON, *lies, "--out", str(tmp_path / "run")]) == 2
        assert "clients of this method are not 'certain'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("phase", [0, 1])
def test_labels_are_mirrored_within_the_task_in_every_phase(phase):
    # classes 3, 4, 5 become 5, 4, 3; class 1 is of another task, and the last row is padding
    upload, _ = sent(faults.corrupt(METHOD, "label_flip", malicious=1), phase=phase)
    assert upload.gather["labels"].tolist() == [[5, 4, 3, 1, 3], [3, 4, 5, 1, 3], [3, 4, 5, 1, 3]]
    same(upload._replace(gather=()), sent(METHOD)[0]._replace(gather=()))


def test_mirroring_twice_gives_the_labels_back():
    label = jnp.arange(CLASSES)
    mirrored = jax.jit(mirror_labels)(label, TASK)
    assert mirrored.tolist() == [0, 1, 2, 5, 4, 3, 6, 7]
    assert mirror_labels(mirrored, TASK).tolist() == label.tolist()
    assert mirror_labels(label, TASK._replace(classes=jnp.array([2, 3, 4, 5])))[2] == 5


def test_a_mirrored_label_of_a_task_with_gaps_is_one_of_its_classes():
    # a client's own task in a private stream: classes 6, 1 and 2, which need be no range
    gaps = TASK._replace(classes=jnp.array([6, 1, 2, -1]))
    assert mirror_labels(jnp.arange(CLASSES), gaps).tolist() == [0, 6, 2, 3, 4, 5, 1, 7]


def test_everything_else_of_the_method_is_the_same_object():
    program = PROGRAM._replace(receive=lambda context, upload: upload)
    method = METHOD._replace(rounds=(Round(program, server=lambda *args: args, when="task_start"),))
    for attack in faults.ATTACKS:
        wrong = faults.corrupt(method, attack, malicious=1)
        assert wrong._replace(rounds=()) == method._replace(rounds=())
        assert wrong.rounds[0]._replace(program=None) == method.rounds[0]._replace(program=None)
        new = wrong.rounds[0].program
        assert (new.start, new.receive) == (program.start, program.receive) and new != program
        assert [phase.view for phase in new.phases] == [phase.view for phase in program.phases]


def test_nobody_malicious_is_the_method_itself():
    assert faults.corrupt(METHOD, "nan", malicious=0) is METHOD
    assert FaultOptions().malicious == 0


def test_an_unknown_attack_and_a_negative_number_of_clients_are_refused():
    with pytest.raises(InputError, match="attack: unknown value 'flip'; did you mean 'sign_flip'"):
        faults.corrupt(METHOD, "flip", malicious=1)
    with pytest.raises(InputError, match="malicious: must be at least 0, got -1"):
        faults.corrupt(METHOD, "nan", malicious=-1)


def test_an_attack_of_the_user_s_own_is_a_function_of_the_honest_upload():
    def half(upload, sender):
        return upload._replace(mean=upload.mean / 2, weight=upload.weight + sender.context.client.id)

    (upload, _), (honest, _) = sent(faults.corrupt(METHOD, half, malicious=2)), sent(METHOD)
    np.testing.assert_array_equal(upload.mean, honest.mean * np.array([[0.5], [0.5], [1.0]]))
    np.testing.assert_array_equal(upload.weight, [30.0, 31.0, 30.0])
    with pytest.raises(InputError, match="^attack: cut returned .*; needed: "):
        sent(faults.corrupt(METHOD, cut, malicious=2))
    with pytest.raises(InputError, match="^method: attack: test_faults.py:.* broken.*: KeyError: 'absent'"):
        sent(faults.corrupt(METHOD, broken, malicious=2))


def cut(upload, sender):
    return upload._replace(mean=upload.mean[:1])


def broken(upload, sender):
    return upload.sum["absent"]


def test_an_attack_carries_its_options_and_one_that_nothing_reads_is_refused():
    given = {"malicious": 2, "attack": "scale", "attack_factor": 3.0, "clients": 4}
    settings = config.from_mapping("fedavg", given, "test")
    (upload, _), (honest, _) = sent(faults.corrupt(METHOD, chosen("attack", settings), 2)), sent(METHOD)
    np.testing.assert_array_equal(upload.mean, honest.mean * np.array([[3.0], [3.0], [1.0]]))
    with pytest.raises(InputError, match="^attack_factor: only scale reads it, and attack is 'nan'"):
        config.from_mapping("fedavg", given | {"attack": "nan"}, "test")
    with pytest.raises(InputError, match="^attack: only --malicious reads it, and 'scale' was given"):
        config.from_mapping("fedavg", {"attack": "scale"}, "test")


# ---- faults drawn in every round ---------------------------------------------------------------------------


def uploads_of(method):
    """Shapes of what a client sends in each round."""
    return tuple(jax.tree.map(lambda x: x[0], sent(method, which=i)[0]) for i in range(len(method.rounds)))


def played(method, rounds=40, clients=5, task=1):
    """What client `c` sends in its round `r`, [clients][rounds], with the state that it keeps."""
    program = method.rounds[0].program
    batch = Batch(jnp.zeros((5, 1, 1, 3)), jnp.array([3, 4, 5, 1, 3]), MASK, jnp.arange(5))

    @jax.jit
    def play(id, round_, state):
        info = ClientInfo(id, jnp.array(5), jnp.zeros(CLASSES, jnp.int32), round_)
        context = ClientContext((), (), (), TASK._replace(index=jnp.array(task)), info)
        local, _ = program.phases[0].step(context, program.start(context, state, KEY), batch, KEY)
        upload, state = program.finish(context, local, state)
        return upload._replace(mean=upload.mean + 0.0 * round_), state

    found = []
    for client in range(clients):
        state, mine = method.init_client(KEY, ()), []
        for round_ in range(rounds):
            upload, state = play(jnp.array(client), jnp.array(round_), state)
            mine.append(upload)
        found.append(mine)
    return found


KEY = jax.random.key(0)
STATEFUL = METHOD._replace(init_client=lambda key, server: jnp.array(6))


def faulty(text, seed=0, method=STATEFUL):
    return faults.with_faults(method, faults.parse_faults(text), seed, uploads_of(METHOD))


@pytest.mark.parametrize(
    "name, factor", [("sign_flip", -1.0), ("scale", 1e6), ("nan", np.nan), ("inf", np.inf), ("late", np.nan)]
)
def test_as_many_uploads_are_spoiled_as_the_share_says_and_the_others_stay(name, factor):
    sent_ = np.array([[u.mean for u in mine] for mine in played(faulty(f"{name}=0.3"))])
    honest = np.isclose(sent_, [1.0, -2.0]).all(-1)
    spoiled = np.isclose(sent_, np.array([1.0, -2.0]) * factor, equal_nan=True)
    spoiled = spoiled.all(-1) if name != "inf" else np.isinf(sent_).all(-1)
    assert (honest ^ spoiled).all() and 0.2 < spoiled.mean() < 0.4
    assert len({tuple(mine) for mine in spoiled}) == 5  # each client has luck of its own


def test_faults_depend_on_seed_task_round_and_client_and_exclude_each_other():
    shares = faults.parse_faults("noise=0.25, drop=0.25,nan=0.5")
    draw = lambda seed, task: np.array(
        [
            [
                int(faults.drawn_fault(shares, seed, jnp.int32(task), jnp.int32(r), jnp.int32(c)))
                for r in range(8)
            ]
            for c in range(4)
        ]
    )
    first = draw(0, 0)
    assert (first == draw(0, 0)).all() and (first != draw(1, 0)).any() and (first != draw(0, 1)).any()
    assert set(np.unique(first)) == {0, 1, 2}
    ids = np.array([0, 2, 3])
    there = faults.reached(shares, 0, 0, 5, ids)
    assert list(there) == [client for client in ids if first[client, 5] != 1]
    assert faults.reached({"nan": 1.0}, 0, 0, 5, ids) is ids


def test_noise_is_as_large_as_what_it_is_added_to():
    sent_ = np.array([[u.mean for u in mine] for mine in played(faulty("noise=1"), rounds=100)])
    assert np.allclose(sent_.std(axis=(0, 1)), np.sqrt(2.5), rtol=0.2) and len(np.unique(sent_)) == sent_.size


def counting(context, local, state):
    """What a client sends says how often it has played."""
    del context, local
    return Upload(
        jnp.array([1.0, -2.0]) * state, {"s": jnp.array(3.0), "n": jnp.array(4)}, (), 30.0
    ), state + 1


def test_stale_clients_send_again_what_they_made_last_and_keep_their_own_state():
    each = METHOD.rounds[0]._replace(program=PROGRAM._replace(finish=counting))
    method = STATEFUL._replace(
        rounds=(each,), predict_client=lambda round_context, server, state, batch: state
    )
    upload = jax.eval_shape(lambda: counting(None, None, jnp.array(6))[0])
    always = faults.with_faults(method, {"stale": 1.0}, 0, (upload,))
    numbers = [float(u.mean[0]) for u in played(always, rounds=4, clients=1)[0]]
    assert numbers == [6, 6, 7, 8]  # there is nothing to repeat the first time
    state = always.init_client(KEY, ())
    assert always.predict_client(None, None, state, None) == 6
    never = faults.with_faults(method, {"stale": 0.0}, 0, (upload,))
    assert [float(u.mean[0]) for u in played(never, rounds=4, clients=1)[0]] == [6, 7, 8, 9]


@pytest.mark.parametrize(
    "text, line",
    [
        ("sing_flip=0.1", "faults: unknown value 'sing_flip'.*sign_flip"),
        ("nan=1.5", "faults: nan='1.5' is not a probability"),
        ("nan", "faults: nan='' is not a probability"),
        ("nan=0.6,inf=0.6", "faults: the probabilities sum to 1.2; nearest: 1"),
        ("nan=0.1,nan=0.1", "faults: 'nan' appears twice"),
    ],
)
def test_faults_that_make_no_sense_are_refused(text, line):
    with pytest.raises(InputError, match=line):
        faults.parse_faults(text)
    assert faults.parse_faults("none") == {}


@pytest.mark.long
def test_a_run_with_faults_says_how_many_uploads_were_left_out(tmp_path, capsys):
    options = [*COMMON, "--rounds", "2", "--clients", "3"]
    mixed = "stale=0.2,drop=0.2,late=0.2"
    assert cli.main(["run", "linear", *options, "--faults", mixed, "--out", str(tmp_path / "mixed")]) == 0
    summary = json.loads((tmp_path / "mixed" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "mixed" / "metrics.jsonl").read_text().splitlines()]
    assert summary["rejected_uploads"] > 0 and min(line["participants"] for line in lines) < 3
    assert "the server rejected" in capsys.readouterr().err


@pytest.mark.long
def test_uploads_are_looked_through_one_by_one_after_a_bad_one(tmp_path, monkeypatch):
    """So that a client whose uploads are bad has a round played twice once, and not in every round."""
    told, play = [], rounds.run_round

    def watched(*args, guarded, **options):
        result = play(*args, guarded=guarded, **options)
        told.append((guarded, result[2].rejected))
        return result

    monkeypatch.setattr(rounds, "run_round", watched)
    options = [*COMMON, "--rounds", "3", "--clients", "4", "--faults", "late=0.2"]
    assert cli.main(["run", "linear", *options, "--out", str(tmp_path / "late")]) == 0
    before = np.cumsum([0, *(rejected for _, rejected in told)])[:-1]
    assert [guarded for guarded, _ in told] == (before > 0).tolist()
    assert before[0] == 0 < before[-1]


@pytest.mark.long
def test_a_run_without_a_valid_upload_is_no_success(tmp_path, capsys):
    options = [*COMMON, "--rounds", "1", "--clients", "2", "--faults", "nan=1"]
    assert cli.main(["run", "linear", *options, "--out", str(tmp_path / "none")]) == 1
    assert "no round had a valid upload" in capsys.readouterr().err
    summary = json.loads((tmp_path / "none" / "summary.json").read_text())
    assert summary["rounds_without_upload"] == [[task, 1] for task in range(1, 6)]


@pytest.mark.long
def test_a_model_that_predicts_nothing_is_wrong_everywhere_and_said_so(tmp_path, capsys):
    """Uploads a million times too large, all finite: the server's numbers stay finite, the outputs do not."""
    small = "--tasks 2 --clients 3 --rounds 2 --epochs 1 --prompt-blocks 1 --prompt-length 2 --faults scale=1"
    out = tmp_path / "large"
    assert cli.main(["run", "fppl", *shlex.split(small), "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["refused_results"] == summary["A_last"] == 0 < summary["unpredicted"]
    assert max(summary["class_accuracy"]) == 0 and summary["calibration"]["ece"] is None
    told = capsys.readouterr().err
    assert f"not finite for {summary['unpredicted']} of" in told and "could not be made" not in told
