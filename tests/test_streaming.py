"""Data that stays on the host gives the bits of resident data in windows of any size, never more than two."""

import itertools
import threading
import time

import jax
import numpy as np
import pytest
import toys
from toys import FROZEN, KEY, PARTICIPATION, TOYS, drive_engine, engine_of, same

from fcljax.data import streaming
from fcljax.data.streaming import Host, over_windows
from fcljax.federated.engine import RoundInputs, init_clients, run_round
from fcljax.mesh import by_device, mesh_of


@pytest.fixture(scope="module")
def data():
    return toys.examples()


@pytest.fixture(scope="module")
def partitions(data):
    return toys.partitions(data)


def on_host(data, rows, overlap=True):
    return Host(jax.tree.map(np.asarray, data), rows, overlap)


def drive(engine, name, data, partitions):
    server, states, reports = drive_engine(engine, data, partitions, PARTICIPATION.get(name, 1.0))
    return server, states, [report.metrics for report in reports]


@pytest.mark.long
@pytest.mark.parametrize("way", ["vmap3", "loop1", "unroll2"])
@pytest.mark.parametrize("name", TOYS)
def test_windows_from_the_host_give_the_bits_of_resident_data(name, way, data, partitions):
    engine = engine_of(name, way)
    resident = drive(engine, name, data, partitions)
    same(drive(engine, name, on_host(data, 30), partitions), resident)
    assert set(engine.traces.values()) <= {1, 2}  # one trace for resident data and one for all windows


@pytest.mark.parametrize(
    ("rows", "overlap"),
    [*itertools.product([1, 13, 10_000], [True, False])],
)
@pytest.mark.long
def test_the_size_of_the_windows_and_their_overlap_change_nothing(rows, overlap, data, partitions):
    """From one step's rows, which is the least, to all of them at once."""
    engine = toys.build(TOYS["two_pass"](), partitions, *toys.WAYS["vmap3"])
    same(
        drive(engine, "two_pass", on_host(data, rows, overlap), partitions),
        drive(engine, "two_pass", data, partitions),
    )


def test_only_the_rows_that_a_window_needs_are_read(data, partitions):
    read = []

    class Watched:
        """An array that notes which rows are asked of it."""

        def __init__(self, array):
            self.array = array

        def __getitem__(self, rows):
            read.append(np.array(rows))
            return self.array[rows]

    engine = engine_of("two_pass", "vmap3")
    server = jax.jit(engine.method.init)(KEY, FROZEN)
    states = init_clients(engine.method, server, toys.CLIENTS, KEY)
    host = Host(toys.Examples(Watched(np.asarray(data.input)), np.asarray(data.label)), window=24)
    ids = np.array([1, 3])
    run_round(engine, server, states, RoundInputs(FROZEN, host, partitions[1], ids, toys.tasks()[1], 0, KEY))
    theirs = np.concatenate(
        [partitions[1].indices[partitions[1].offset[i] : partitions[1].offset[i + 1]] for i in ids]
    )
    assert max(map(len, read)) <= 24
    assert set(np.concatenate(read).tolist()) == {0, *theirs.tolist()}  # row 0 stands for padding


@pytest.mark.parametrize("name", ["two_pass", "replaying"])
@pytest.mark.long
def test_several_devices_get_windows_of_their_own_and_give_the_bits_of_resident_data(name, data, partitions):
    """Each device's rows alone: of a window of 24 rows a device holds no more than those of its lane."""
    engine = toys.build(
        TOYS[name](),
        partitions,
        toys.Lanes(2, "vmap"),
        3,
        PARTICIPATION.get(name, 1.0),
        mesh=mesh_of(jax.devices()[:2]),
    )
    resident = drive(engine, name, data, partitions)
    same(drive(engine, name, on_host(data, 24), partitions), resident)
    assert set(engine.traces.values()) <= {1, 2}


def test_a_device_is_sent_its_part_of_the_rows():
    """Two steps of four rows on two devices: the first two of each step go to the first device."""
    rows, order = np.arange(8), by_device(2, 2, 2)
    window = Host(np.arange(80).reshape(8, 10), 99).take(rows[order], mesh_of(jax.devices()[:2]), parted=True)
    parts = {shard.device.id: np.asarray(shard.data)[:, 0].tolist() for shard in window.addressable_shards}
    assert list(parts.values()) == [[0, 10, 40, 50], [20, 30, 60, 70]]


# ---- the loop over windows ---------------------------------------------------------------------------------


def test_the_next_window_is_loaded_while_the_step_runs_and_at_most_two_exist():
    """An item's step ends only when the next item has been loaded: without overlap this would never end."""
    loaded, alive, most = [threading.Event() for _ in range(6)], set(), []

    class Running:
        """What the device is computing for an item."""

        def __init__(self, item):
            self.item = item

        def block_until_ready(self):
            assert self.item == 5 or loaded[self.item + 1].wait(20)
            alive.discard(self.item)

    def load(item):
        alive.add(item)
        most.append(len(alive))
        loaded[item].set()
        return item

    last = over_windows(lambda carry, item, window: Running(item), 0, range(6), load)
    assert last.item == 5
    assert most == [1, 2, 2, 2, 2, 2]


def test_without_overlap_a_window_is_loaded_after_the_step_before_it():
    events = []

    def step(carry, item, window):
        time.sleep(0.01)
        events.append(("step", item))
        return carry + window

    def load(item):
        events.append(("load", item))
        return item

    assert over_windows(step, 0, [1, 2, 3], load, overlap=False) == 6
    assert events == [(what, item) for item in (1, 2, 3) for what in ("load", "step")]


def test_no_windows_leave_the_carry_as_it_is():
    assert (
        over_windows(
            lambda *args: pytest.fail("nothing to do"), 7, [], lambda item: pytest.fail("nothing to load")
        )
        == 7
    )


def test_an_error_while_loading_reaches_the_caller():
    def load(item):
        raise OSError(5, "Input/output error", "x_train.npy")

    with pytest.raises(OSError, match="x_train.npy"):
        over_windows(lambda carry, item, window: carry, 0, [1], load)


def test_a_single_window_starts_no_thread(monkeypatch):
    """Each of thousands of clients with a model of its own is evaluated in one."""
    monkeypatch.setattr(streaming, "ThreadPoolExecutor", None)
    for overlap in (True, False):
        found = over_windows(lambda carry, item, window: [*carry, (item, window)], [], [3], str, overlap)
        assert found == [(3, "3")]
