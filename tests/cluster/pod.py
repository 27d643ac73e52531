"""A pod of `cluster.kubelet`: its container is a process, in namespaces and with a separate file system."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.api import BROKEN, STRATEGIC_MERGE, Namespace, Object, Refused
from cluster.api import decoded as of_base64

if TYPE_CHECKING:
    from cluster.kubelet import Kubelet

RETRY_S = 0.2
MOST_BACK_OFF_S = 300.0
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HERE = Path(__file__).parent


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def say(*what: object) -> None:
    print(f"{time.time():.3f}", *what, flush=True)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` if there is such a variable; ``$$`` is a dollar sign."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)", value, text)


class Impossible(Exception):
    """The container can't be created now, for this reason: it waits as ``ContainerCreating`` or the given state."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Pod:
    """One pod of this node, from its first process to its end; a thread does slow operations."""

    def __init__(self, kubelet: Kubelet, pod: Object, address: str) -> None:
        self.kubelet = kubelet
        self.object = pod
        self.address = address
        self.uid: str = pod["metadata"]["uid"]
        self.name: str = pod["metadata"]["name"]
        self.namespace = Namespace(pod["metadata"]["namespace"], kubelet.api)
        self.container: Object = pod["spec"]["containers"][0]
        self.folder = kubelet.folder / "pods" / self.uid
        self.folder.mkdir(parents=True)
        self.hosts = self.folder / "hosts"
        self.process: subprocess.Popen[bytes] | None = None
        self.ended = threading.Event()
        self.environment: dict[str, str] = {}
        self._condition = threading.Condition()
        self._stop_at: float | None = None  # the end of its grace period
        self._forgotten = False  # its status is not needed any more
        self._unhealthy = False
        self._ready = False
        self._restarts = 0
        self._last: Object = {}
        self._state: Object = {"waiting": {"reason": "ContainerCreating"}}
        self._phase = "Pending"
        self._since: dict[str, tuple[str, str]] = {}
        self._started = now()

    def start(self) -> None:
        threading.Thread(target=self._live, daemon=True).start()

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after this time; a second call may shorten it."""
        with self._condition:
            until = time.monotonic() + grace_s
            first = self._stop_at is None
            self._stop_at = until if self._stop_at is None else min(self._stop_at, until)
            self._condition.notify_all()
        if first:
            threading.Thread(target=self._end, daemon=True).start()

    def compare(self, shown: Object) -> None:
        """The API shows it so. Where the node was not heard of for a while, its pods are held for not ready: the
        kubelet that is back says what is true.
        """
        conditions = {each["type"]: each for each in shown["status"].get("conditions") or ()}
        with self._condition:
            wrong = self._ready and conditions.get("Ready", {}).get("status") == "False"
        if wrong:
            threading.Thread(target=self._say, kwargs={"again": True}, daemon=True).start()

    def forget(self, *, kill: bool) -> None:
        """It was deleted by force."""
        with self._condition:
            self._forgotten = True
            if self._stop_at is None:
                self._stop_at = time.monotonic()
            self._condition.notify_all()
        if kill:
            self._signal(signal.SIGKILL)

    # What runs

    def _live(self) -> None:
        try:
            self._say()
            self._run()
        except Exception:
            say(self.name, traceback.format_exc())
        finally:
            self.ended.set()

    def _run(self) -> None:
        policy = self.object["spec"].get("restartPolicy", "Always")
        while True:
            if not self._made():
                return
            began = now()
            code = self._container(began)
            stopping = self._stop_at is not None
            terminated = {
                "exitCode": code,
                "reason": "Completed" if code == 0 else "Error",
                "startedAt": began,
                "finishedAt": now(),
            }
            if message := self._message():
                terminated["message"] = message
            say(self.name, "ended with", code)
            done = policy == "Never" or (policy == "OnFailure" and code == 0)
            if stopping or done:
                phase = "Succeeded" if code == 0 else "Failed"
                self._say(phase=phase, state={"terminated": terminated}, ready=False)
                return
            self._last = {"terminated": terminated}
            if self._restarts:
                self._say(state={"waiting": {"reason": "CrashLoopBackOff"}}, ready=False)
                back_off_s = self.kubelet.back_off_s * 2 ** min(self._restarts - 1, 20)
                self._pause(min(MOST_BACK_OFF_S, back_off_s))
            else:
                self._say(state={"terminated": terminated}, ready=False)
            self._restarts += 1

    def _made(self) -> bool:
        """Return whether there is a folder with all contents of the container; false if it must stop before."""
        while self._stop_at is None:
            try:
                self._make()
                return True
            except Impossible as error:
                self._say(state={"waiting": {"reason": error.reason, "message": str(error)}})
                self._pause(RETRY_S)
            except BROKEN:
                self._pause(RETRY_S)
        return False

    def _container(self, began: str) -> int:
        """Return its exit code, once it has ended."""
        command = [str(HERE / "pod_root.sh"), str(self.folder), *self._command()]
        separate = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        log = self.kubelet.logs / f"{self.namespace.name}_{self.name}.log"
        with self._condition:
            if self._stop_at is not None:
                return 143
            self._unhealthy = False
            with open(log, "ab") as output:
                self.process = subprocess.Popen(
                    [*separate, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={"PATH": IMAGE_PATH, **self.kubelet.mark},
                )
        process = self.process
        while process.poll() is None and not self._begun():
            time.sleep(0.005)
        say(self.name, "runs as", process.pid, "at", self.address)
        probes = {
            name: self.container[name]
            for name in ("startupProbe", "readinessProbe", "livenessProbe")
            if name in self.container
        }
        waits = "startupProbe" in probes or "readinessProbe" in probes
        self._say(phase="Running", state={"running": {"startedAt": began}}, ready=not waits)
        if probes:
            threading.Thread(target=self._probe, args=(process, probes), daemon=True).start()
        code = process.wait()
        return 128 - code if code < 0 else code

    def _end(self) -> None:
        hook = self.container.get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook and self.process is not None and self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._inside(hook["command"], max(0.1, (self._stop_at or 0) - time.monotonic()))
        self._signal(signal.SIGTERM)
        with self._condition:
            while not self.ended.is_set() and not self._forgotten:
                left = (self._stop_at or 0) - time.monotonic()
                if left <= 0:
                    break
                self._condition.wait(min(left, 0.02))
        if not self.ended.is_set():
            self._signal(signal.SIGKILL)
            self.ended.wait(10)
        self.kubelet.remove(self)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._condition:
            while self._stop_at is None and (left := deadline - time.monotonic()) > 0:
                self._condition.wait(left)

    def first_process(self) -> int | None:
        """Return the pid of the container's process 1 on this machine; its parent has only created the namespaces."""
        process = self.process
        if process is None or process.poll() is not None:
            return None
        with contextlib.suppress(OSError, IndexError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            return int(children.split()[0])
        return None

    def _begun(self) -> bool:
        """Wait until its file system exists, and its command runs: that has the pod's environment."""
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{self.first_process()}/environ").read_bytes()
            return self.kubelet.pod_mark.encode() in environment.split(b"\0")
        return False

    def _signal(self, number: signal.Signals) -> None:
        # Process 1 gets no signal without a handler, except SIGKILL from outside, which ends all of them.
        if number == signal.SIGKILL and self.process is not None and self.process.poll() is None:
            self.process.kill()
        elif (first := self.first_process()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, number)

    # Its contents

    def _command(self) -> list[str]:
        words = self.container.get("command") or self.kubelet.images.get(
            self.container["image"], []
        )
        words = [*words, *self.container.get("args", [])]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        # `chroot` has entered the pod's root; from there on PATH is the pod's.
        where = self.container.get("workingDir", "/")
        return [
            "/usr/bin/env",
            "-i",
            "-C",
            where,
            *variables,
            *(expanded(word, self.environment) for word in words),
        ]

    def _make(self) -> None:
        if not self.container.get("command") and self.container["image"] not in self.kubelet.images:
            raise Impossible("ErrImagePull", f"no such image: {self.container['image']}")
        self.environment = self._environment()
        spec = self.object["spec"]
        fixed = self.folder / "fixed"
        fixed.mkdir(exist_ok=True)
        (fixed / "host.conf").write_text("multi on\n")
        (fixed / "nsswitch.conf").write_text(
            "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"
        )
        (fixed / "message").write_text("")
        with self.kubelet.lock:
            if not self.hosts.exists():
                self.hosts.touch()
        self.kubelet.write_hosts(self)
        message = self.container.get("terminationMessagePath", "/dev/termination-log")
        mounts = [
            (str(self.hosts), "/etc/hosts", ""),
            (str(fixed / "host.conf"), "/etc/host.conf", "ro"),
            (str(fixed / "nsswitch.conf"), "/etc/nsswitch.conf", "ro"),
            (str(fixed / "message"), message, ""),
            *((str(path), str(path), "") for path in self.kubelet.shared),
        ]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        for mount in self.container.get("volumeMounts", []):
            source, options = self._volume(volumes[mount["name"]])
            inside = expanded(mount.get("subPathExpr", mount.get("subPath", "")), self.environment)
            if inside and source != "tmpfs":
                source = str(Path(source) / inside)
                if not os.path.exists(source):
                    os.makedirs(source)
            if mount.get("readOnly") and source != "tmpfs":
                options = "ro"
            mounts.append((source, mount["mountPath"], options))
        mounts.sort(key=lambda mount: mount[1].count("/"))  # outer ones first
        (self.folder / "mounts").write_text("".join("\t".join(mount) + "\n" for mount in mounts))
        security = {**spec.get("securityContext", {}), **self.container.get("securityContext", {})}
        settings = {
            "hostname": self.environment["HOSTNAME"],
            "user": security.get("runAsUser", ""),
            "group": security.get("runAsGroup", ""),
            "read_only": "yes" if security.get("readOnlyRootFilesystem") else "",
        }
        (self.folder / "settings").write_text(
            "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in settings.items())
        )

    def _environment(self) -> dict[str, str]:
        """Merge the variables of an image, of the API's service and of the pod's container."""
        found = {
            "PATH": IMAGE_PATH,
            "HOME": "/root",
            "HOSTNAME": self.object["spec"].get("hostname") or self.name,
            "KUBERNETES_SERVICE_HOST": self.kubelet.api.host,
            "KUBERNETES_SERVICE_PORT": str(self.kubelet.api.port),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self.kubelet.api.port),
            **self.kubelet.image_environment,
            **self.kubelet.mark,
            **dict([self.kubelet.pod_mark.split("=", 1)]),
        }
        for source in self.container.get("envFrom", []):
            kind = "ConfigMap" if "configMapRef" in source else "Secret"
            reference = source.get("configMapRef") or source["secretRef"]
            values = self._data(kind, reference["name"], reference.get("optional", False))
            prefix = source.get("prefix", "")
            found |= {prefix + name: value.decode() for name, value in values.items()}
        for variable in self.container.get("env", []):
            value = self._value(variable, found)
            if value is not None:
                found[variable["name"]] = value
        return found

    def _value(self, variable: Object, found: Mapping[str, str]) -> str | None:
        source = variable.get("valueFrom")
        if not source:
            return expanded(variable.get("value", ""), found)
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        if "resourceFieldRef" in source:
            kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
            return str(self.container.get("resources", {}).get(kind, {}).get(resource, "0"))
        kind = "ConfigMap" if "configMapKeyRef" in source else "Secret"
        reference = source.get("configMapKeyRef") or source["secretKeyRef"]
        values = self._data(kind, reference["name"], reference.get("optional", False))
        if reference["key"] in values:
            return str(values[reference["key"]], "utf-8")
        if reference.get("optional"):
            return None
        raise Impossible("CreateContainerConfigError", f"no key {reference['key']} in {kind}")

    def _field(self, path: str) -> str:
        metadata = self.object["metadata"]
        if keyed := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
            return str(metadata.get(keyed[1], {}).get(keyed[2], ""))
        if path in ("metadata.labels", "metadata.annotations"):
            pairs = metadata.get(path.partition(".")[2], {})
            return "\n".join(f"{name}={json.dumps(pairs[name])}" for name in sorted(pairs))
        fields: dict[str, str] = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace.name,
            "metadata.uid": self.uid,
            "spec.nodeName": self.kubelet.node,
            "spec.serviceAccountName": self.object["spec"].get("serviceAccountName", ""),
            "status.hostIP": "127.0.0.1",
            "status.podIP": self.address,
            "status.podIPs": self.address,
        }
        return fields[path]

    def _data(self, kind: str, name: str, optional: bool) -> dict[str, bytes]:
        try:
            found = self.namespace.get(kind, name)
        except Refused as error:
            if error.code != 404:
                raise Impossible("ContainerCreating", str(error)) from None
            if optional:
                return {}
            raise Impossible("CreateContainerConfigError", f"no {kind} {name}") from None
        if kind == "Secret":
            return of_base64(found.get("data", {}))
        plain = {key: value.encode() for key, value in (found.get("data") or {}).items()}
        return plain | of_base64(found.get("binaryData", {}))

    def _volume(self, volume: Object) -> tuple[str, str]:
        """Return its place on this machine, and ``ro`` or nothing; or ``tmpfs`` with its options."""
        folder = self.folder / "volumes" / volume["name"]
        if "emptyDir" in volume:
            if volume["emptyDir"].get("medium") == "Memory":
                limit = volume["emptyDir"].get("sizeLimit")
                size = f",size={bytes_of(str(limit))}" if limit else ""
                return "tmpfs", f"mode=1777{size}"
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o777)
            return str(folder), ""
        if "hostPath" in volume:
            path = Path(volume["hostPath"]["path"])
            if volume["hostPath"].get("type") == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                raise Impossible("ContainerCreating", f"no {path} on this node")
            return str(path), ""
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]
            found = self.namespace.get("PersistentVolumeClaim", claim["claimName"])
            if found["status"].get("phase") != "Bound":
                raise Impossible("ContainerCreating", f"{claim['claimName']} is not bound")
            path = self.kubelet.claim(self.namespace.name, claim["claimName"])
            return str(path), "ro" if claim.get("readOnly") else ""
        mode, files = self._files(volume)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        for name, (content, own_mode) in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(own_mode if own_mode is not None else mode)
            self._give_to_group(path)
        return str(folder), "ro"

    def _give_to_group(self, path: Path) -> None:
        group = self.object["spec"].get("securityContext", {}).get("fsGroup")
        if group is not None:
            os.chown(path, -1, group)
            path.chmod(path.stat().st_mode | 0o040)

    def _files(self, volume: Object) -> tuple[int, dict[str, tuple[bytes, int | None]]]:
        """Return the default mode, and each file's own mode, if it has one."""
        for kind in ("configMap", "secret", "downwardAPI", "projected"):
            if kind in volume:
                break
        else:
            raise Impossible("ContainerCreating", f"unknown kind of volume: {volume}")
        source = volume[kind]
        mode = source.get("defaultMode", 0o644)
        files: dict[str, tuple[bytes, int | None]] = {}
        parts: list[Object] = source["sources"] if kind == "projected" else [{kind: source}]
        for part in parts:
            files |= self._part(part)
        return mode, files

    def _part(self, part: Object) -> dict[str, tuple[bytes, int | None]]:
        if "downwardAPI" in part:
            return {
                item["path"]: (
                    self._field(item["fieldRef"]["fieldPath"]).encode(),
                    item.get("mode"),
                )
                for item in part["downwardAPI"].get("items", [])
            }
        if "serviceAccountToken" in part:
            return {part["serviceAccountToken"]["path"]: (self._token(part), None)}
        kind = "configMap" if "configMap" in part else "secret"
        source = part[kind]
        name = source.get("secretName") or source["name"]
        title = "ConfigMap" if kind == "configMap" else "Secret"
        values = self._data(title, name, source.get("optional", False))
        if "items" not in source:
            return {key: (value, None) for key, value in values.items()}
        return {
            item["path"]: (values[item["key"]], item.get("mode"))
            for item in source["items"]
            if item["key"] in values
        }

    def _token(self, part: Object) -> bytes:
        account = self.object["spec"].get("serviceAccountName", "default")
        asked = part["serviceAccountToken"]
        audience: str | None = asked.get("audience")
        spec: Object = {
            "audiences": [audience] if audience else [],
            "expirationSeconds": asked.get("expirationSeconds", 3600),
        }
        made = self.kubelet.api.create(
            self.namespace.path("ServiceAccount", account, "token"),
            {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": spec},
        )
        return str(made["status"]["token"]).encode()

    def _message(self) -> str:
        with contextlib.suppress(OSError):
            message: str = (self.folder / "fixed" / "message").read_text(errors="replace")
            return message[:4096]
        return ""

    # Requests to it

    def _inside(self, command: list[str], timeout_s: float) -> bool:
        first = self.first_process()
        if first is None:
            return False
        # --root and --wd: the pod's, which is not the one of its mount namespace
        enter = ["nsenter", "--target", str(first), "--mount", "--uts", "--ipc", "--pid"]
        enter += ["--root", "--wd", "/usr/bin/env", "-i"]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return (
            subprocess.run(
                [*enter, *variables, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
            ).returncode
            == 0
        )

    def _asked(self, probe: Object) -> bool:
        timeout_s = float(probe.get("timeoutSeconds", 1))
        try:
            if "exec" in probe:
                return self._inside(probe["exec"]["command"], timeout_s)
            if "tcpSocket" in probe:
                port = self._port(probe["tcpSocket"]["port"])
                socket.create_connection((self.address, port), timeout_s).close()
                return True
            asked = probe["httpGet"]
            connection = http.client.HTTPConnection(
                asked.get("host", self.address), self._port(asked["port"]), timeout=timeout_s
            )
            with contextlib.closing(connection):
                connection.request("GET", asked.get("path", "/"))
                return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException, subprocess.TimeoutExpired):
            return False

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        named = {
            each.get("name"): each["containerPort"] for each in self.container.get("ports", [])
        }
        return int(named[port])

    def _probe(self, process: subprocess.Popen[bytes], probes: dict[str, Object]) -> None:
        """Run them in turn: a start-up probe until it has succeeded, then the others."""
        began = time.monotonic()
        counts = dict.fromkeys(probes, 0)  # in a row: above 0 successes, below 0 failures
        due = {name: began + probe.get("initialDelaySeconds", 0) for name, probe in probes.items()}
        while process.poll() is None:
            asked = ["startupProbe"] if "startupProbe" in probes else list(probes)
            for name in asked:
                if time.monotonic() < due[name]:
                    continue
                probe = probes[name]
                good = self._asked(probe)
                if process.poll() is not None:
                    return
                due[name] = time.monotonic() + probe.get("periodSeconds", 10)
                counts[name] = max(counts[name], 0) + 1 if good else min(counts[name], 0) - 1
                enough = counts[name] >= probe.get("successThreshold", 1)
                failed = -counts[name] >= probe.get("failureThreshold", 3)
                if name == "readinessProbe" and (enough or failed) and self._stop_at is None:
                    self._say(ready=enough)
                elif name != "readinessProbe" and failed:
                    say(self.name, name, "has failed")
                    self._restart(process)
                    return
                elif name == "startupProbe" and enough:
                    del probes[name]
                    if "readinessProbe" not in probes:
                        self._say(ready=True)
                    break
            time.sleep(0.05)

    def _restart(self, process: subprocess.Popen[bytes]) -> None:
        if (first := self.first_process()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGTERM)
        grace_s = self.object["spec"].get("terminationGracePeriodSeconds", 30)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()

    # Its status

    def _say(
        self,
        *,
        phase: str | None = None,
        state: Object | None = None,
        ready: bool | None = None,
        again: bool = False,
    ) -> None:
        with self._condition:
            before = (self._phase, self._state, self._ready)
            self._phase = phase or self._phase
            self._state = state or self._state
            self._ready = self._ready if ready is None else ready
            if before == (self._phase, self._state, self._ready) and self._since and not again:
                return
            status = self._status()
        while not self._forgotten:
            try:
                self.kubelet.api.patch(
                    self.namespace.path("Pod", self.name, "status"),
                    {"metadata": {"uid": self.uid}, "status": status},
                    content=STRATEGIC_MERGE,
                )
                return
            except Refused as error:
                if error.code in (404, 409, 422):
                    return
                say(self.name, error)
            except BROKEN as error:
                say(self.name, repr(error))
            time.sleep(RETRY_S)

    def _status(self) -> Object:
        said = {
            "Initialized": "True",
            "PodScheduled": "True",
            "ContainersReady": str(self._ready),
            "Ready": str(self._ready),
        }
        for name, value in said.items():
            if self._since.get(name, ("", ""))[0] != value:
                self._since[name] = (value, now())
        completed = {"reason": "PodCompleted"} if self._phase == "Succeeded" else {}
        conditions = [
            {"type": name, "status": value, "lastTransitionTime": self._since[name][1], **completed}
            for name, value in said.items()
        ]
        container = {
            "name": self.container["name"],
            "image": self.container["image"],
            "imageID": "",
            "ready": self._ready,
            "started": "running" in self._state,
            "restartCount": self._restarts,
            "state": {kind: None for kind in ("waiting", "running", "terminated")} | self._state,
            "lastState": self._last,
        }
        return {
            "phase": self._phase,
            "hostIP": "127.0.0.1",
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self._started,
            "conditions": conditions,
            "containerStatuses": [container],
        }


def bytes_of(quantity: str) -> int:
    """Parse ``64Mi`` and the like."""
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}
    for unit, size in units.items():
        if quantity.endswith(unit):
            return int(float(quantity[: -len(unit)]) * size)
    return int(quantity)
