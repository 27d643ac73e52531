"""A real Kubernetes control plane on loopback: etcd, kube-apiserver, kube-controller-manager and kube-scheduler.

`build_control_plane.sh` builds the programs. Nodes are `cluster.kubelet`: their pods are processes of this machine. All
of them carry one mark in their environment; by it `ControlPlane.close`, or `cluster.sweeper` where a run of the tests
is killed, finds what is left.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from cluster.api import BROKEN, PATHS, Api, Namespace, Object, Refused, ready
from harness.ports import free_ports
from harness.processes import clean_environment, kill_all, marked
from harness.waiting import wait_until

SERVERS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
CLIENTS = ("helm", "kubectl")
NEEDED = ("etcd", "openssl", "unshare", "nsenter", "setpriv")
MARK = "TEST_CLUSTER"
NODE_MARK = "TEST_NODE"  # also of processes of pods
START_S = 90.0  # one to five seconds on an idle machine
END_S = 5.0
LEEWAY_S = 60.0  # for clock differences, the API server accepts an expired token
TESTS = Path(__file__).parent.parent


def cache() -> Path:
    """Return the folder of the programs, as `build_control_plane.sh`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hvd-elastic" / "kubernetes-1.20.2"


def missing() -> str | None:
    """Return why no control plane can run here."""
    there = all((cache() / name).exists() for name in (*SERVERS, *CLIENTS))
    if not there or not all(shutil.which(name) for name in NEEDED):
        return "the control plane is not built: run `make kubernetes`"
    if os.getuid() != 0:
        return "pods mount file systems of their own: the tests have to run as root"
    return None


def eventually(true: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    wait_until(true, what, timeout_s)


class Server:
    """One process, with its log in ``NAME.log``."""

    def __init__(self, folder: Path, name: str, command: Sequence[str], mark: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = [str(part) for part in command]
        self._environment = clean_environment() | {MARK: mark, "PYTHONPATH": python_path()}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def check(self) -> None:
        assert self._process is not None and self._process.poll() is None, (
            f"{self.name} has ended:\n{self.tail()}"
        )

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """Kill it with SIGKILL, also if it is frozen or has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop it; it has stopped when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        what = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
        wait_until(lambda: os.waitid(os.P_PID, self.pid, what), f"the stop of {self.name}", END_S)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self.freeze()
        try:
            yield
        finally:
            self.thaw()


class Node(Server):
    """A kubelet in a separate process. If it is frozen, its pods live on without reports."""

    def __init__(self, plane: ControlPlane, name: str, subnet: str, flags: Sequence[str]) -> None:
        command = [sys.executable, "-m", "cluster.kubelet", str(plane.kubeconfig()), name]
        command += [str(plane.folder / "nodes" / name), "--subnet", subnet]
        command += ["--logs", str(plane.folder / "logs"), "--claims", str(plane.folder / "claims")]
        command += ["--mark", f"{MARK}={plane.mark}"]
        command += ["--pod-mark", f"{NODE_MARK}={plane.mark}/{name}", *flags]
        super().__init__(plane.folder, name, command, plane.mark)
        self.subnet = subnet
        self._plane = plane

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until pods may be placed on it."""

        def usable(node: Object | None) -> bool:
            self.check()
            return node is not None and ready(node) and not node["spec"].get("taints")

        self._plane.api.wait(f"{PATHS['Node']}/{self.name}", usable, timeout_s=timeout_s)

    def pids(self) -> list[int]:
        """Return the pids of its pods' processes, in this machine's namespace."""
        return [process.pid for process in marked(f"{NODE_MARK}={self._plane.mark}/{self.name}")]

    def wait_pids(self, number: int) -> list[int]:
        """Wait until this number of processes runs on the whole node."""
        eventually(lambda: len(self.pids()) == number, f"{number} processes run on {self.name}")
        return self.pids()

    def remove(self) -> None:
        """End it with all its pods, and remove the node from the API."""
        self.kill()
        folder = str(self._plane.folder / "nodes" / self.name / "pods")
        # Processes that create a pod's namespaces have its folder in their command. With them, all processes in it end.
        kill_all(
            lambda: (
                each
                for each in marked(f"{MARK}={self._plane.mark}")
                if folder in " ".join(each.info["cmdline"])
            )
        )
        kill_all(lambda: marked(f"{NODE_MARK}={self._plane.mark}/{self.name}"))
        with contextlib.suppress(Refused, *BROKEN):
            self._plane.api.delete(f"{PATHS['Node']}/{self.name}", grace_s=0)


class ControlPlane:
    """A control plane: start it once for a run of tests, with a namespace for each test."""

    def __init__(self, folder: Path, *, scheduler: bool = True) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.admin_token = secrets.token_hex(16)
        self.user_token = secrets.token_hex(16)  # of a user without permissions
        self.port, etcd_port, peer_port, manager_port, scheduler_port = free_ports(5)
        self.host = "127.0.0.1"
        self.server = f"https://{self.host}:{self.port}"
        self.ca = folder / "keys" / "ca.crt"
        self._nodes: list[Node] = []
        self._numbers: Iterator[int] = iter(range(1, 255))
        self._sweeper: subprocess.Popen[bytes] | None = None
        for name in ("keys", "logs", "claims", "nodes", "home"):
            (folder / name).mkdir(parents=True)
        programs, keys = cache(), folder / "keys"
        url, peer = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
        self.etcd = self._process(
            "etcd",
            *("etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync", "--log-level", "warn"),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}", "--logger", "zap"),
        )
        self.api_server = self._process(
            "kube-apiserver",
            programs / "kube-apiserver",
            f"--etcd-servers={url}",
            *("--bind-address=127.0.0.1", f"--secure-port={self.port}"),
            # A loopback address can't be an endpoint, so there are none.
            *("--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none"),
            f"--tls-cert-file={keys / 'server.crt'}",
            f"--tls-private-key-file={keys / 'server.key'}",
            *(f"--client-ca-file={self.ca}", f"--token-auth-file={keys / 'tokens.csv'}"),
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={keys / 'accounts.key'}",
            f"--service-account-key-file={keys / 'accounts.pub'}",
            *("--service-cluster-ip-range=10.96.0.0/16", "--allow-privileged"),
        )
        self._make_keys()
        self.api = self.api_of(self.admin_token)
        config = self.kubeconfig()
        common = [f"--kubeconfig={config}", "--leader-elect=false", "--bind-address=127.0.0.1"]
        self.controllers = self._process(
            "kube-controller-manager",
            *(programs / "kube-controller-manager", *common, "--port=0"),
            f"--secure-port={manager_port}",
            f"--service-account-private-key-file={keys / 'accounts.key'}",
            f"--root-ca-file={self.ca}",
            *("--node-monitor-period=1s", "--node-monitor-grace-period=6s"),
            "--node-startup-grace-period=10s",
            *("--pvclaimbinder-sync-period=1s", "--namespace-sync-period=10s"),
        )
        self.scheduler = self._process(
            "kube-scheduler",
            *(programs / "kube-scheduler", *common, "--port=0"),
            f"--secure-port={scheduler_port}",
        )
        self._with_scheduler = scheduler

    def start(self) -> None:
        """Start it; it answers, and its controllers have created the first service account, when this returns."""
        self._sweeper = subprocess.Popen(
            [sys.executable, "-m", "cluster.sweeper", f"{MARK}={self.mark}", str(self.folder)],
            stdin=subprocess.PIPE,
            env=clean_environment() | {"PYTHONPATH": python_path()},
            start_new_session=True,
        )
        self.etcd.start()
        self.start_api_server()
        self.controllers.start()
        if self._with_scheduler:
            self.scheduler.start()
        self.api.wait(
            PATHS["ServiceAccount"].format("default") + "/default", bool, timeout_s=START_S
        )

    def close(self) -> None:
        """Stop it; no process of it, its nodes and their pods, and no folder is left."""
        self.api_server.kill()
        kill_all(lambda: marked(f"{MARK}={self.mark}"))
        for server in (self.etcd, self.controllers, self.scheduler, *self._nodes):
            server.kill()
        if self._sweeper is not None:
            self._sweeper.kill()
            self._sweeper.wait()
            assert self._sweeper.stdin is not None
            self._sweeper.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Faults

    def kill_api_server(self) -> None:
        self.api_server.kill()

    def start_api_server(self) -> None:
        """Restart it; it answers when this returns."""
        self.api_server.start()
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(Refused, *BROKEN):
                if self.api.call("GET", "/readyz", timeout_s=2) == "ok":
                    return
            self.api_server.check()
            assert time.monotonic() < deadline, f"no answer:\n{self.api_server.tail()}"
            time.sleep(0.05)

    def etcd_frozen(self) -> contextlib.AbstractContextManager[None]:
        """Freeze etcd during the block: reads and writes of the API hang."""
        return self.etcd.frozen()

    # Operations of tests

    def api_of(self, token: str) -> Api:
        return Api(self.host, self.port, self.ca, token)

    def token(self, namespace: Namespace, account: str, *, lives_s: float) -> str:
        """Of a service account, as the API server makes them, but for their end: it makes none of less than 600 s, and
        takes each for `LEEWAY_S` longer.
        """
        asked = {"kind": "TokenRequest", "spec": {"audiences": [], "expirationSeconds": 600}}
        path = namespace.path("ServiceAccount", account, "token")
        made = self.api.create(path, {"apiVersion": "authentication.k8s.io/v1", **asked})
        head, body, _ = made["status"]["token"].split(".")
        claims = json.loads(base64.urlsafe_b64decode(body + "=="))
        claims["exp"] = int(time.time() + lives_s - LEEWAY_S)
        signed = f"{head}.{encoded(json.dumps(claims).encode())}"
        sign = ["openssl", "dgst", "-sha256", "-sign", str(self.folder / "keys" / "accounts.key")]
        done = subprocess.run(sign, input=signed.encode(), capture_output=True, timeout=30)
        return f"{signed}.{encoded(done.stdout)}"

    def kubeconfig(self, token: str | None = None) -> Path:
        """Write a file for a client with this token; the admin's by default."""
        token = token or self.admin_token
        path = self.folder / "keys" / f"kubeconfig-{token[:8]}"
        cluster = {"server": self.server, "certificate-authority": str(self.ca)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        if not path.exists():
            path.write_text(yaml.safe_dump(content))
        return path

    @contextlib.contextmanager
    def namespace(self, prefix: str = "test") -> Iterator[Namespace]:
        """Create a namespace with a unique name, in which a service account exists."""
        found = Namespace(f"{prefix}-{secrets.token_hex(4)}", self.api)
        self.api.create(PATHS["Namespace"], {"metadata": {"name": found.name}})
        try:
            found.wait(
                "ServiceAccount", "default", lambda account: account and account.get("secrets")
            )
            yield found
        finally:
            with contextlib.suppress(Refused, *BROKEN):
                self.api.delete(f"{PATHS['Namespace']}/{found.name}")
                for pod in found.list("Pod"):
                    found.delete("Pod", pod["metadata"]["name"], grace_s=0)

    def add_node(
        self,
        *,
        bind: bool = False,
        heartless: bool = False,
        back_off_s: float = 1.0,
        share: Sequence[Path] = (),
        images: Mapping[str, Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Node:
        """Add a node; see `cluster.kubelet` for the arguments. ``remove`` ends it, or the end of the run."""
        number = next(self._numbers)
        subnet = f"127.{1 + self.port % 250}.{number}"
        flags = ["--back-off", str(back_off_s)]
        flags += ["--bind"] * bind + ["--heartless"] * heartless
        for path in share:
            flags += ["--share", str(path)]
        for name, value in (
            ("--images", images),
            ("--environment", environment),
            ("--labels", labels),
        ):
            if value:
                flags += [name, json.dumps(value)]
        node = Node(self, f"node-{number}", subnet, flags)
        self._nodes.append(node)
        node.start()
        if wait:
            node.wait_ready()
        return node

    def log(self, namespace: Namespace, pod: str) -> str:
        """Return the output of all containers of pods with this name so far."""
        path = self.folder / "logs" / f"{namespace.name}_{pod}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def claim(self, namespace: Namespace, name: str) -> Path:
        """Return the folder that pods mount for this claim."""
        return self.folder / "claims" / f"{namespace.name}_{name}"

    def helm(self, *arguments: str, timeout_s: float = 60.0) -> str:
        return self._client("helm", arguments, timeout_s)

    def kubectl(self, *arguments: str, timeout_s: float = 30.0) -> str:
        return self._client("kubectl", arguments, timeout_s)

    def environment(self, token: str | None = None) -> dict[str, str]:
        """Return the environment of helm, kubectl and the Python client; they write only into its folder."""
        home = str(self.folder / "home")
        own = {"HOME": home, "KUBECONFIG": str(self.kubeconfig(token))}
        own |= {f"HELM_{kind}_HOME": f"{home}/{kind}" for kind in ("CACHE", "CONFIG", "DATA")}
        clean = clean_environment("KUBE", "HELM_", "XDG_")
        return clean | own | {"PATH": f"{cache()}{os.pathsep}{clean['PATH']}"}

    # Its creation

    def _client(self, program: str, arguments: Sequence[str], timeout_s: float) -> str:
        """Run a program and return its output, which is the message of an error."""
        done = subprocess.run(
            [str(cache() / program), *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        shown = " ".join(arguments)
        assert done.returncode == 0, f"{program} {shown}: {done.stdout}{done.stderr}"
        return done.stdout

    def _process(self, name: str, *command: object) -> Server:
        return Server(self.folder, name, [str(part) for part in command], self.mark)

    def _make_keys(self) -> None:
        """Create a certificate authority, the server's certificate, and the keys that sign service account tokens."""
        keys = self.folder / "keys"
        names = "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:10.96.0.1"
        (keys / "names").write_text(f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\n")
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"]
        usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        for command in (
            [
                "req",
                "-x509",
                *curve,
                "-keyout",
                "ca.key",
                "-out",
                "ca.crt",
                "-subj",
                "/CN=test",
                *usage,
            ],
            ["req", *curve, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server"],
            [
                "x509",
                "-req",
                *signed,
                "-in",
                "server.csr",
                "-out",
                "server.crt",
                "-extfile",
                "names",
            ],
            ["genrsa", "-out", "accounts.key", "2048"],
            ["rsa", "-in", "accounts.key", "-pubout", "-out", "accounts.pub"],
        ):
            subprocess.run(
                ["openssl", *command], cwd=keys, check=True, capture_output=True, timeout=30
            )
        admin = f'{self.admin_token},admin,admin,"system:masters"\n'
        (keys / "tokens.csv").write_text(f"{admin}{self.user_token},user,user,\n")


def encoded(data: bytes) -> str:
    """Encode like the parts of a token."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def python_path() -> str:
    return os.pathsep.join((str(TESTS), str(TESTS.parent)))
