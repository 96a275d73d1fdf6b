"""`paddle.distributed.launch` with an eye on its ranks.

    python -m ppldm.training.distributed.launch [its flags] SCRIPT [flags]

Paddle's launcher starts the processes, on this machine or as one of several, and its flags stay its own. What is added:

- The first rank that fails (`utils/processes/signals.py`) is named with the last lines of its log, whose exit status
  the launcher has too. The others have GRACE_SECONDS to end; then they and their loader processes are killed.
  (Paddle's own shows the failed rank with the lowest number, which often is a victim of another one.)
- SIGTERM, SIGUSR1 and Ctrl-C go to every rank's main process, and the ranks may take as long as they need to save; a
  second Ctrl-C kills them. (Paddle's own kills them after 30 seconds, or dies of SIGUSR1 and leaves them running.)
- `--master` may be a name. (Paddle's own waits for ever for one that is not written as the address which the first
  machine finds under its own name, and that address is a loopback one on many systems.)
- Ranks meet at ports that the system gives to nobody else meanwhile; PORT_RANGE=FIRST:LAST names others. (Paddle's own
  are also given to the gloo of another run, which then takes a rank that looks for its own main one for its peer.)
- With several machines, where one launcher fails, or is silent for SILENCE_SECONDS, the others stop as well.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from ...utils.errors import ConfigError, debugging, exit_on_error
from ...utils.files import write_json
from ...utils.machine.cpu import importing_paddle
from ...utils.processes.signals import FOLDER_VARIABLE, answer_interrupts
from ...utils.variables import set_for_libraries

if __name__ == "__main__":
    answer_interrupts()
with importing_paddle():
    from paddle.distributed.launch.context import Context
    from paddle.distributed.launch.controllers.collective import CollectiveController

GRACE_SECONDS = 10.0  # for the other ranks to end by themselves, after one failed
SETTLE_SECONDS = 2.0  # after a rank failed, for the one that it is a victim of to end
BEAT_SECONDS = 2.0
SILENCE_SECONDS = 40.0  # without a sign of life from another machine's launcher
TAIL_LINES = 40
_STOPPED = (130, os.EX_TEMPFAIL)  # exit statuses of a rank that saved and ended because a signal asked
_PORTS = "20000:32767"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

HINTS = {
    signal.SIGKILL: "most often as memory ran out: see dmesg; take fewer loader processes or a smaller batch",
    signal.SIGBUS: "most often /dev/shm is too small",
    signal.SIGSEGV: "a fault in native code",
    signal.SIGABRT: "native code gave up; its reason stands above",
}


class Rank:
    """One process that Paddle's launcher started, and its log."""

    def __init__(self, container, log_start: int):
        self.process = container._proc._proc
        self.rank = int(container.env["PADDLE_TRAINER_ID"])
        self.log = Path(container.outfile)
        self.log_start = log_start
        self.notes = container.env[FOLDER_VARIABLE]

    @property
    def status(self) -> int | None:
        """None while it runs; its exit status, or minus the number of the signal that killed it."""
        return self.process.poll()

    @property
    def failed(self) -> bool:
        """True if it ended neither well nor on request."""
        return self.status not in (None, 0, *_STOPPED)

    @property
    def blame(self) -> tuple[int, float, int]:
        """Least for the one of several failed ranks that failed first. One that was killed had no part in it, and could
        note no moment; one that gives up by SIGABRT often lost its connection."""
        kind = 2 if self.status == -signal.SIGABRT else 0 if self.status < 0 else 1
        return kind, self.failure_sec, self.rank

    @property
    def failure_sec(self) -> float:
        """The moment that it noted, by this machine's clock; infinity without a note."""
        try:
            with open(os.path.join(self.notes, str(self.rank))) as file:
                return float(file.read())
        except (OSError, ValueError):
            return float("inf")

    def kill_all(self) -> None:
        """Kill it and its loader processes: Paddle made it the leader of a process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def describe(self) -> str:
        """Why it failed, and the last lines that it logged."""
        if self.status < 0:
            number = signal.Signals(-self.status)
            how = f"was killed by {number.name}" + (f" ({HINTS[number]})" if number in HINTS else "")
        else:
            how = f"ended with exit status {self.status}"
        with open(self.log, errors="replace") as file:
            file.seek(self.log_start)
            lines = file.read().splitlines()[-TAIL_LINES:]
        tail = "\n".join(f"  [{self.rank}] {line}" for line in lines)
        return f"error: rank {self.rank} failed first: it {how}; the last lines of {self.log}:\n{tail}\n"


class Peers(threading.Thread):
    """Tells the launchers of other machines how this one is, and finds out how they are. `endpoint`: where the
    key-value server listens which Paddle's first launcher runs. `trouble` is None or a sentence; `told` is the `state`
    that the others can read."""

    def __init__(self, endpoint: str, job: str, node: int, num_nodes: int):
        super().__init__(daemon=True)
        self.url, self.node, self.num_nodes = f"http://{endpoint}/ppldm/{job}", node, num_nodes
        self.state, self.told, self.trouble = "running", "", None
        self.beats: dict[int, tuple[str, float]] = {}
        self.others_ended = False

    def run(self) -> None:
        """Report and look, again and again."""
        last_answer, count = time.monotonic(), 0
        while True:
            count += 1
            try:
                self._exchange(count)
                last_answer = time.monotonic()
            except (OSError, ValueError):
                if time.monotonic() - last_answer > SILENCE_SECONDS:
                    self.trouble = "the launcher of machine 0 does not answer"
            time.sleep(BEAT_SECONDS)

    def _exchange(self, count: int) -> None:
        state = self.state
        request = urllib.request.Request(f"{self.url}/{self.node}", data=f"{state} {count}".encode())
        urllib.request.urlopen(request, timeout=5).close()
        self.told = state
        with urllib.request.urlopen(f"{self.url}/", timeout=5) as answer:
            beats = {int(key.rsplit("/", 1)[1]): value for key, value in json.load(answer).items()}
        self.look(beats, time.monotonic())

    def look(self, beats: dict[int, str], now: float) -> None:
        """Judge what each machine last said: its state and a count that rises as long as it lives."""
        ended = 0
        for node in set(range(self.num_nodes)) - {self.node}:
            said, since = self.beats.get(node, ("", now))
            if beats.get(node, "") != said:
                said, since = beats[node], now
            self.beats[node] = (said, since)
            state = said.partition(" ")[0]
            ended += state in ("done", "failed")
            if state == "failed":
                self.trouble = f"a rank on machine {node} failed; its launcher says why"
            elif state != "done" and now - since > SILENCE_SECONDS:
                self.trouble = f"the launcher of machine {node} gives no sign of life"
        self.others_ended = ended == self.num_nodes - 1


class WatchedController(CollectiveController):
    """Paddle's controller of one machine's processes, with another way to watch and to end them."""

    def __init__(self, context: Context):
        self.stop_number, self.is_given_up = 0, False
        self.ranks: list[Rank] = []
        self.peers: Peers | None = None
        super().__init__(context)
        for number in _SIGNALS:
            signal.signal(number, self._forward)

    def _forward(self, number: int, _frame) -> None:
        self.is_given_up |= self.stop_number == signal.SIGINT == number
        self.stop_number = number
        if not self.ranks:  # still waiting for the other machines
            sys.exit(self._stop_status())
        for rank in self.ranks:
            # To its main process only, which Popen knows to have ended where it has.
            rank.kill_all() if self.is_given_up else rank.process.send_signal(number)

    def _stop_status(self) -> int:
        return 130 if self.stop_number == signal.SIGINT else os.EX_TEMPFAIL

    def deploy_pod(self) -> None:
        """Start the processes; remember where each log begins."""
        starts = [os.path.getsize(c.outfile) if os.path.exists(c.outfile) else 0 for c in self.pod.containers]
        super().deploy_pod()
        for container in self.pod.containers:  # Paddle has written all of the environment; ranks look for its own there
            own = {name: value for name, value in container.env.items() if name.startswith("PADDLE_")}
            write_json(Path(self.ctx.args.log_dir, f"backup_env.{container.env['PADDLE_TRAINER_ID']}.json"), own)
        self.ranks = [Rank(*pair) for pair in zip(self.pod.containers, starts, strict=True)]
        if self.job.replicas > 1:
            self.peers = Peers(self.master.endpoint, self.job.id, self.pod.rank, self.job.replicas)
            self.peers.start()

    def save_pod_env(self) -> None:
        """Paddle's would write the environment beside the logs, and with it what is secret in it."""

    def save_pod_log(self, info) -> None:
        """Paddle's would begin a log with the environment."""

    def watch(self) -> bool:
        """Wait for the end of all ranks; show the first that fails and end the others."""
        status, deadline, settle_until, next_logs = 0, None, None, 0.0
        while True:
            running = any(rank.status is None for rank in self.ranks)
            if settle_until is None and any(rank.failed for rank in self.ranks):
                settle_until = time.monotonic() + SETTLE_SECONDS
            is_settling = running and settle_until is not None and time.monotonic() < settle_until + self._late_sec()
            problem = None if status or is_settling else self._find_problem()
            if problem or time.monotonic() > next_logs:
                self.pod.logs()
                with suppress(OSError):  # of a pipe that nobody reads any more: the ranks go on
                    sys.stdout.flush()  # a pipe gets the lines while they run
                next_logs = time.monotonic() + 1
            if problem:
                status, text = problem
                sys.stderr.write(text)
            if deadline is None and (status or self._is_stopping_without_main()):
                deadline = time.monotonic() + GRACE_SECONDS
            if not running:
                break
            if deadline and time.monotonic() > deadline:
                for rank in self.ranks:
                    rank.kill_all()
            time.sleep(0.02)
        while self.pod.logs():
            pass
        for rank in self.ranks:
            rank.kill_all()  # what is left of its loader processes
        self.exit_status = status or max(rank.status or 0 for rank in self.ranks)
        return True

    def _late_sec(self) -> float:
        """How much longer those are waited for that have noted their failure and have not ended."""
        late = any(rank.status is None and rank.failure_sec < float("inf") for rank in self.ranks)
        return GRACE_SECONDS if late else 0.0

    def _find_problem(self) -> tuple[int, str] | None:
        """(exit status, what to tell) of the first rank that failed, or of another machine."""
        failed = [rank for rank in self.ranks if rank.failed]
        if failed and self.is_given_up:
            return 130, "stopped; the same command again goes on from the last checkpoint\n"
        if self.stop_number and any(rank.status == -self.stop_number for rank in failed):
            return self._stop_status(), "stopped before training began\n"
        if failed:
            first = min(failed, key=lambda rank: rank.blame)
            status = first.status or 0
            return (status if status > 0 else 128 - status), first.describe()
        if self.peers and self.peers.trouble:
            return 1, f"error: {self.peers.trouble}\n"
        return None

    def _is_stopping_without_main(self) -> bool:
        """True where ranks have ended on request and none of those left is the main one, which may be saving."""
        stopped = any(rank.status in _STOPPED for rank in self.ranks)
        return stopped and all(rank.rank != 0 or rank.status is not None for rank in self.ranks)

    def finalize(self, exit: bool = True) -> None:
        """Let the other machines know how it ended, and end. The machine that carries the messages ends last."""
        if self.peers:
            self.peers.state = "done" if self.exit_status in (0, *_STOPPED) else "failed"
            until = time.monotonic() + (SILENCE_SECONDS if self.master.role == self.master.MAIN else 3 * BEAT_SECONDS)
            while time.monotonic() < until and not (self.peers.others_ended and self.peers.told == self.peers.state):
                time.sleep(0.1)
        self.master.stop()
        if exit:
            sys.exit(self.exit_status)


def meet_at(master: str) -> tuple[str, str]:
    """(`master` with its address in numbers, the address by which this machine reaches it). Raises ConfigError."""
    host, _, port = master.rpartition(":")
    try:
        address = socket.gethostbyname(host)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, int(port)))  # which sends nothing
            return f"{address}:{int(port)}", probe.getsockname()[0]
    except (OSError, ValueError, OverflowError) as error:
        fix = "give HOST:PORT of the first machine"
        raise ConfigError(f"--master {master} cannot be found ({error}); {fix}") from error


def run(notes: str) -> None:
    """Start what the command line says and end with its exit status; ranks that fail note it in the folder `notes`.
    Raises ConfigError for another kind of launch."""
    set_for_libraries({"PORT_RANGE": _PORTS})
    context = Context()
    context.set_envs({FOLDER_VARIABLE: notes})
    if context.args.log_level.upper() == "INFO" and not debugging():
        context.logger.setLevel("WARNING")  # of its default, which says nothing to a user
    if context.is_legacy_mode() or context.is_auto_tuner_mode() or context.args.run_mode not in (None, "collective"):
        raise ConfigError("only collective runs are watched; use python -m paddle.distributed.launch for other kinds")
    ips = (context.args.ips or "").split(",")
    if len(ips) > 1 and not context.args.master:
        if context.node.ip not in ips:
            text = f"--ips {context.args.ips} lacks this machine's address {context.node.ip}"
            raise ConfigError(f"{text}; add or correct it")
        context.args.master = f"{ips[0]}:{context.args.start_port}"
        context.args.nnodes, context.args.rank = str(len(ips)), ips.index(context.node.ip)
    elif context.args.master and "://" not in context.args.master:
        context.args.master, address = meet_at(context.args.master)
        context.node.ip = context.args.host or address
    if not context.args.log_dir:
        raise ConfigError("--log_dir must name a folder: the ranks' last lines are read there")
    context.args.run_mode = "collective"
    controller = WatchedController(context)
    controller.run()
    controller.finalize()


if __name__ == "__main__":
    with exit_on_error(), tempfile.TemporaryDirectory() as notes:
        run(notes)
