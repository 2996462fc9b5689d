"""The manifests for Kubernetes: what they name exists, and the objects fit each other; and the page that tells of them.

That a cluster runs them is not shown here.
"""

import re
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from batchline.api.health import HealthRoutes
from batchline.telemetry.metrics import Metrics
from tests.support.deploy_files import ENV, IMAGE, ROOT, VARIABLES, VERBS, Object, last, load, parsed, settings_of

_FOLDER = ROOT / "deploy" / "kubernetes"
_PAGE = (ROOT / "docs" / "deploying.md").read_text()
_VERSIONS = {
    "Namespace": "v1",
    "ConfigMap": "v1",
    "Secret": "v1",
    "Service": "v1",
    "Job": "batch/v1",
    "Deployment": "apps/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Ingress": "networking.k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "ScaledObject": "keda.sh/v1alpha1",
}
_CUSTOM = {"PodMonitor", "ScaledObject"}
"""Kinds of other projects, of which Kubernetes has no schemas."""
_KUBERNETES = kubernetes_validate.latest_version()
_KUSTOMIZATION = load(_FOLDER / "kustomization.yaml")
_APPLIED = {name: load(_FOLDER / name) for name in _KUSTOMIZATION["resources"]}
_EXAMPLES = {path.name: load(path) for path in (_FOLDER / "examples").iterdir()}
_SECRET = load(_FOLDER / "secret.example.yaml")
_WORKLOADS = {name: each for name, each in _APPLIED.items() if each["kind"] in {"Deployment", "Job"}}
_DEPLOYMENTS = {each["metadata"]["name"]: each for each in _APPLIED.values() if each["kind"] == "Deployment"}


def _pod(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def _container(workload: Object) -> Object:
    [container] = _pod(workload)["containers"]
    only: Object = container
    return only


def _generated(generator: Object) -> Object:
    """Return the ConfigMap that kustomize makes, without the hash in its name."""
    data = {name: (_FOLDER / name).read_text() for name in generator.get("files", ())}
    for name in generator.get("envs", ()):
        lines = [line for line in (_FOLDER / name).read_text().splitlines() if line and not line.startswith("#")]
        data |= dict(line.split("=", 1) for line in lines)
    names = {key: generator[key] for key in ("name", "namespace")}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": names, "data": data}


_CONFIG_MAPS = [_generated(generator) for generator in _KUSTOMIZATION["configMapGenerator"]]


def _kind(kind: str, name: str) -> Object:
    [found] = [
        each
        for each in (*_APPLIED.values(), *_CONFIG_MAPS, _SECRET)
        if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return found


def test_every_manifest_is_applied_but_the_example_of_a_secret() -> None:
    there = {path.name for path in _FOLDER.iterdir()}
    generated = {
        name
        for each in _KUSTOMIZATION["configMapGenerator"]
        for name in (*each.get("files", ()), *each.get("envs", ()))
    }
    assert set(_APPLIED) | generated == there - {"examples", "kustomization.yaml", "secret.example.yaml"}
    for each in [*_APPLIED.values(), *_EXAMPLES.values(), _SECRET]:
        assert _VERSIONS[each["kind"]] == each["apiVersion"]
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", each["metadata"]["name"])
        assert each["kind"] == "Namespace" or _kind("Namespace", each["metadata"]["namespace"])


@pytest.mark.parametrize("name", [*_APPLIED, *_EXAMPLES, "secret.example.yaml", "configMapGenerator"])
def test_kubernetes_knows_every_field(name: str) -> None:
    """With the schemas of Kubernetes, which have no custom resources. A name that is misspelled is refused."""
    named = _APPLIED | _EXAMPLES | {"secret.example.yaml": _SECRET}
    for each in [named[name]] if name in named else _CONFIG_MAPS:
        if each["kind"] not in _CUSTOM:
            kubernetes_validate.validate(each, _KUBERNETES, strict=True)
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(each | {"misspelled": {}}, _KUBERNETES, strict=True)


def test_the_example_of_a_secret_holds_none() -> None:
    assert all("REPLACE-ME" in value for value in _SECRET["stringData"].values())


def test_the_manifests_run_this_version_in_each_role() -> None:
    [transformed] = _KUSTOMIZATION["images"]
    assert f"{transformed['name']}:{transformed['newTag']}" == IMAGE
    assert {_container(workload)["image"] for workload in _WORKLOADS.values()} == {IMAGE}
    verbs = [_container(workload)["args"] for workload in _WORKLOADS.values()]
    assert sorted(verbs) == [["api"], ["migrate"], ["worker"]]
    assert {verb for [verb] in verbs} <= set(VERBS)


@pytest.mark.parametrize("name", _DEPLOYMENTS)
def test_selectors_find_the_pods_they_mean(name: str) -> None:
    deployment = _DEPLOYMENTS[name]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    others = [each["spec"]["template"]["metadata"]["labels"] for each in _WORKLOADS.values() if each is not deployment]
    assert labels not in others
    for constraint in _pod(deployment).get("topologySpreadConstraints", []):
        assert constraint["labelSelector"]["matchLabels"] == labels


def test_service_budget_and_policy_select_a_role() -> None:
    """Each selects the pods of the role that its file is named for."""
    api, worker = (_DEPLOYMENTS[f"batchline-{role}"]["spec"]["selector"]["matchLabels"] for role in ("api", "worker"))
    assert _APPLIED["api-service.yaml"]["spec"]["selector"] == api
    assert _APPLIED["api-pdb.yaml"]["spec"]["selector"]["matchLabels"] == api
    assert _APPLIED["worker-pdb.yaml"]["spec"]["selector"]["matchLabels"] == worker
    assert _APPLIED["worker-networkpolicy.yaml"]["spec"]["podSelector"]["matchLabels"] == worker
    assert _APPLIED["api-networkpolicy.yaml"]["spec"]["podSelector"]["matchLabels"] == api


def test_every_port_that_is_named_is_one_that_is_served() -> None:
    """F5: probes ask for a page that needs no credentials, at the port that the image listens on."""
    for deployment in _DEPLOYMENTS.values():
        container = _container(deployment)
        [port] = container["ports"]
        assert str(port["containerPort"]) == ENV["BATCHLINE_PORT"]
        probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
        assert {probe["port"] for probe in probes.values()} == {port["name"]}
        assert [probe["path"] for probe in probes.values()] == ["/healthz", "/healthz", "/readyz"]
        assert all(hasattr(HealthRoutes, probe["path"].removeprefix("/")) for probe in probes.values())
    [opened] = _APPLIED["api-service.yaml"]["spec"]["ports"]
    policies = [_APPLIED[f"{role}-networkpolicy.yaml"]["spec"]["ingress"] for role in ("api", "worker")]
    let_in = [port["port"] for [allowed] in policies for port in allowed["ports"]]
    assert {opened["targetPort"], *let_in} == {"http"}


def test_the_database_is_reached_only_with_a_checked_certificate() -> None:
    """The examples that people copy check who answers, and not only that the bytes are encrypted."""
    assert "sslmode=verify-full&sslrootcert=" in _SECRET["stringData"]["BATCHLINE_DATABASE_URL"]
    assert "name?sslmode=verify-full&sslrootcert=" in _PAGE


@pytest.mark.parametrize("name", _WORKLOADS)
def test_the_settings_of_a_pod_are_settings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F2: each name is known, each value is taken, and the file that is named is mounted and can be read."""
    container = _container(_WORKLOADS[name])
    [shown, hidden] = container["envFrom"]
    public = _kind("ConfigMap", shown["configMapRef"]["name"])["data"]
    secret = _kind("Secret", hidden["secretRef"]["name"])["stringData"]
    assert not public.keys() & secret.keys()
    assert {*public, *secret} <= VARIABLES
    assert all(isinstance(value, str) for value in (*public.values(), *secret.values()))
    file = tmp_path / "batchline.toml"
    file.write_text(_mounted(_WORKLOADS[name], Path(public["BATCHLINE_CONFIG"])))
    settings = settings_of(monkeypatch, ENV, public, secret, {"BATCHLINE_CONFIG": str(file)})
    assert capsys.readouterr().err == ""
    assert settings.database_url is not None
    assert settings.storage_url is not None
    assert not settings.embeds_model


def _mounted(workload: Object, path: Path) -> str:
    [name] = [mount["name"] for mount in _container(workload)["volumeMounts"] if mount["mountPath"] == str(path.parent)]
    [volume] = [volume for volume in _pod(workload)["volumes"] if volume["name"] == name]
    text: str = _kind("ConfigMap", volume["configMap"]["name"])["data"][path.name]
    return text


@pytest.mark.parametrize("name", _DEPLOYMENTS)
def test_a_node_waits_for_the_migration_with_the_image_and_the_settings_that_it_runs_with(name: str) -> None:
    """F1: a node that starts before the job is done does not crash, and old pods stay until the new ones are ready."""
    deployment = _DEPLOYMENTS[name]
    container = _container(deployment)
    [waiting] = _pod(deployment)["initContainers"]
    assert waiting["args"] == ["migrate", "--wait"]
    for same in ("image", "envFrom", "securityContext"):
        assert waiting[same] == container[same]
    assert [mount for mount in container["volumeMounts"] if mount["name"] != "data"] == waiting["volumeMounts"]


@pytest.mark.parametrize("name", _WORKLOADS)
def test_a_pod_is_allowed_where_the_namespace_is_restricted(name: str) -> None:
    pod, container = _pod(_WORKLOADS[name]), _container(_WORKLOADS[name])
    user, group = map(int, last("USER").split(":"))
    assert _APPLIED["namespace.yaml"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": group,
        "fsGroup": group,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", _WORKLOADS)
def test_a_pod_can_write_where_the_program_writes(name: str) -> None:
    volumes = {volume["name"]: volume for volume in _pod(_WORKLOADS[name])["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in _container(_WORKLOADS[name])["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    for path in (ENV["BATCHLINE_DATA_DIR"], "/tmp"):
        assert "emptyDir" in volumes[mounts[path]]


@pytest.mark.parametrize("name", _WORKLOADS)
def test_no_service_of_the_cluster_becomes_a_setting(name: str) -> None:
    """Kubernetes sets BATCHLINE_PORT=tcp://... in every pod beside a service of that name, unless it is told not to."""
    assert _pod(_WORKLOADS[name])["enableServiceLinks"] is False


@pytest.mark.parametrize("name", _DEPLOYMENTS)
def test_a_pod_has_the_time_to_drain(name: str) -> None:
    """F5: what comes before SIGTERM is taken from the same time."""
    grace = float(_kind("ConfigMap", "batchline")["data"]["BATCHLINE_SHUTDOWN_GRACE_SECONDS"])
    before = _container(_DEPLOYMENTS[name]).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    waits = sum(float(word) for word in before if word.isdigit())
    assert _pod(_DEPLOYMENTS[name])["terminationGracePeriodSeconds"] >= grace + waits + 15


@pytest.mark.parametrize("role", ["api", "worker"])
def test_the_autoscaler_alone_says_how_many_there_are(role: str) -> None:
    scaler, deployment = (
        _kind("HorizontalPodAutoscaler", f"batchline-{role}")["spec"],
        _DEPLOYMENTS[f"batchline-{role}"],
    )
    target = scaler["scaleTargetRef"]
    assert target == {key: deployment[key] for key in ("apiVersion", "kind")} | {"name": deployment["metadata"]["name"]}
    assert "replicas" not in deployment["spec"]
    assert 2 <= scaler["minReplicas"] < scaler["maxReplicas"]


def test_autoscalers_look_at_something_that_is_told() -> None:
    """F5: the API's at CPU, of which a share is asked for; the workers' at a metric that the program has."""
    [cpu] = _kind("HorizontalPodAutoscaler", "batchline-api")["spec"]["metrics"]
    [queue] = _kind("HorizontalPodAutoscaler", "batchline-worker")["spec"]["metrics"]
    assert cpu["resource"]["name"] in _container(_DEPLOYMENTS["batchline-api"])["resources"]["requests"]
    assert f"\n{queue['external']['metric']['name']} " in Metrics().render().decode()


def test_the_examples_fit_what_is_applied() -> None:
    """F5: KEDA scales by the metric of the other autoscaler, and the monitor finds the pods and the token."""
    keda, monitor, ingress = (
        _EXAMPLES[name]["spec"] for name in ("keda-scaledobject.yaml", "podmonitor.yaml", "ingress.yaml")
    )
    scaler = _kind("HorizontalPodAutoscaler", "batchline-worker")["spec"]
    assert keda["scaleTargetRef"]["name"] == scaler["scaleTargetRef"]["name"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (scaler["minReplicas"], scaler["maxReplicas"])
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == scaler["behavior"]
    [trigger], [metric] = keda["triggers"], scaler["metrics"]
    assert trigger["metadata"]["query"].startswith(f"max({metric['external']['metric']['name']}")
    assert trigger["metadata"]["threshold"] == metric["external"]["target"]["averageValue"]
    [endpoint] = monitor["podMetricsEndpoints"]
    [component] = monitor["selector"]["matchExpressions"]
    for role in component["values"]:
        deployment = _DEPLOYMENTS[f"batchline-{role}"]
        assert monitor["selector"]["matchLabels"].items() <= deployment["metadata"]["labels"].items()
        assert endpoint["port"] == _container(deployment)["ports"][0]["name"]
    assert endpoint["authorization"]["credentials"]["key"] in _SECRET["stringData"]
    [rule] = ingress["rules"]
    [path] = rule["http"]["paths"]
    service = _APPLIED["api-service.yaml"]
    assert path["backend"]["service"]["name"] == service["metadata"]["name"]
    assert path["backend"]["service"]["port"]["name"] == service["spec"]["ports"][0]["name"]


def test_the_page_names_only_settings_commands_and_metrics_that_there_are() -> None:
    commands = {"".join(found) for found in re.findall(r"`batchline ([a-z]+)`|\bbatchline ([a-z]+) create", _PAGE)}
    assert {"api", "keys", "migrate", "worker"} <= commands <= set(VERBS)
    assert set(re.findall(r"\b(?:BATCHLINE|AWS)_[A-Z_]*[A-Z]\b", _PAGE)) <= VARIABLES
    told = Metrics().render().decode()
    assert [name for name in re.findall(r"\bbatchline_[a-z_]+", _PAGE) if f"# TYPE {name} " not in told] == []


def test_the_page_names_only_files_and_images_that_there_are() -> None:
    links = [ROOT / "docs" / link for link in re.findall(r"\]\(([^)]+)\)", _PAGE)]
    paths = [ROOT / path for path in re.findall(r"\bdeploy/[\w./-]+", _PAGE)]
    assert [path for path in (*links, *paths) if not path.exists()] == []
    used = (ROOT / "Dockerfile").read_text() + (ROOT / "compose.yaml").read_text()
    images = re.findall(r"\b(?:[a-z]+/)?(?:batchline|chrislusf|postgres|python|seaweedfs):[\d.]+\d[\w-]*", _PAGE)
    assert len(set(images)) == 4
    assert [image for image in images if image not in used] == []


def test_the_rule_for_the_autoscaler_tells_its_metric_and_counts_it_once() -> None:
    """Each node tells the queue of the whole fleet."""
    blocks = re.findall(r"```yaml\n(.*?)```", _PAGE, re.DOTALL)
    scrape, adapter = (parsed(block, where="the page") for block in blocks)
    [rule] = adapter["rules"]["external"]
    [metric] = _kind("HorizontalPodAutoscaler", "batchline-worker")["spec"]["metrics"]
    assert rule["name"]["as"] == metric["external"]["metric"]["name"]
    assert rule["metricsQuery"].startswith("max(")
    [job] = scrape["scrape_configs"]
    assert job["authorization"]["credentials_file"].rpartition("/")[2] in _SECRET["stringData"]


def test_the_page_says_what_has_not_been_tried() -> None:
    text = " ".join(_PAGE.split())
    assert "has not been built by docker" in text
    assert "The manifests were not run on a cluster" in text
