"""The KubeRay manifest and the Containerfile, checked by reading them. Nothing in them is run."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
SECRETIVE = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")

spec = importlib.util.spec_from_file_location("kuberay", REPOSITORY / "scripts" / "kuberay.py")
kuberay = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kuberay)
RENDERED, IMAGE = kuberay.SHOWN, kuberay.IMAGE


def config_path(name):
    return REPOSITORY / "configs" / f"{name}.yaml"


# --- the manifest ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest():
    return list(yaml.safe_load_all((DEPLOY / "kuberay" / "rayservice.yaml").read_text()))


@pytest.fixture
def cluster(manifest):
    return manifest[0]["spec"]["rayClusterConfig"]


@pytest.fixture
def pods(cluster):
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.fixture
def containers(pods):
    return [container for pod in pods for container in pod["spec"]["containers"]]


def test_the_manifest_says_how_it_was_rendered():
    command = (
        f"python scripts/kuberay.py configs/{RENDERED.name} --image {IMAGE} --gated >"
        " deploy/kuberay/rayservice.yaml"
    )
    assert command in kuberay.FILE.read_text()


def test_the_configuration_is_in_it_word_for_word(manifest):
    assert yaml.safe_load(manifest[0]["spec"]["serveConfigV2"]) == yaml.safe_load(
        RENDERED.read_text()
    )


def test_secrets_are_references(manifest, containers):
    assert "Secret" not in [document["kind"] for document in manifest]
    for container in containers:
        for variable in container["env"]:
            if SECRETIVE.search(variable["name"]):
                assert set(variable) == {"name", "valueFrom"}
                assert set(variable["valueFrom"]) == {"secretKeyRef"}
        assert [set(source) for source in container["envFrom"]] == [{"secretRef"}]


def test_every_ray_process_has_the_token(cluster, containers):
    assert cluster["authOptions"] == {"mode": "token", "secretName": "cfg-serve-ray-token"}
    for container in containers:
        variables = {variable["name"]: variable for variable in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        reference = variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": cluster["authOptions"]["secretName"], "key": "auth_token"}


def test_three_lines_are_marked_for_the_reader(manifest):
    """The head says how many, and which."""
    text = (DEPLOY / "kuberay" / "rayservice.yaml").read_text()
    head, body = re.split(r"^apiVersion", text, maxsplit=1, flags=re.MULTILINE)
    assert "Three lines are yours, each marked EDIT" in head
    marked = [line.strip() for line in body.splitlines() if "# EDIT: " in line]
    assert [line.removeprefix("# ").partition(":")[0] for line in marked] == [
        "access",
        "image",
        "storageClassName",
    ]
    assert body.count(IMAGE) == 1  # all containers refer to that line


@pytest.mark.parametrize("gated", [True, False])
def test_pods_of_a_gated_model_do_not_start_without_its_token(gated):
    text = kuberay.render(RENDERED, IMAGE, gated=gated)
    cluster = next(yaml.safe_load_all(text))["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        (token,) = [entry for entry in container["env"] if entry["name"] == "HF_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {
            "name": "cfg-serve-hf-token",
            "key": "token",
            "optional": not gated,
        }
    assert ("pods do not start without it" in text) == gated


def test_the_rendered_model_is_said_to_be_gated():
    model = yaml.safe_load(RENDERED.read_text())["applications"][0]["args"]["model"]
    assert f"model: {model}   # gated: HF_TOKEN" in RENDERED.read_text()
    assert (
        " --gated " in (DEPLOY / "kuberay" / "rayservice.yaml").read_text().split("apiVersion")[0]
    )


def test_only_gpu_pods_tolerate_gpu_nodes(cluster):
    gpu, cpu = cluster["workerGroupSpecs"]
    (toleration,) = gpu["template"]["spec"]["tolerations"]
    assert toleration == {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert cpu["template"]["spec"]["tolerations"] == []
    assert "tolerations" not in cluster["headGroupSpec"]["template"]["spec"]


def test_downloaded_models_outlive_their_pods(manifest, pods):
    """Of two mounts one below the other, the upper would belong to root."""
    (claim,) = [document for document in manifest if document["kind"] == "PersistentVolumeClaim"]
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        variables = {entry["name"]: entry.get("value") for entry in container["env"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        volume = volumes[mounts[variables["HF_HOME"]]]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        for path in mounts:
            assert not any(other.startswith(f"{path}/") for other in mounts), path


def test_containers_run_without_privileges(cluster, pods, containers):
    for pod in pods:
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
    for security in (c["securityContext"] for c in (*containers, cluster["autoscalerOptions"])):
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
    assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in containers)


def test_replicas_fit_the_pods(cluster):
    gpu, cpu = cluster["workerGroupSpecs"]
    resources = gpu["template"]["spec"]["containers"][0]["resources"]
    replica = yaml.safe_load(RENDERED.read_text())["applications"][0]["deployments"][1]
    assert int(resources["limits"]["nvidia.com/gpu"]) == sum(
        b["GPU"] for b in replica["placement_group_bundles"]
    )
    scaling = replica["autoscaling_config"]
    assert (gpu["minReplicas"], gpu["maxReplicas"]) == (
        scaling["min_replicas"],
        scaling["max_replicas"],
    )
    assert "nvidia.com/gpu" not in json.dumps(cpu)
    for group in (gpu, cpu):
        resources = group["template"]["spec"]["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_pods_wait_for_streams(manifest, cluster):
    deployments = yaml.safe_load(RENDERED.read_text())["applications"][0]["deployments"]
    longest_s = max(deployment.get("graceful_shutdown_timeout_s", 0) for deployment in deployments)
    assert longest_s > 0
    assert manifest[0]["spec"]["rayClusterDeletionDelaySeconds"] >= longest_s
    for group in cluster["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        (drain_s,) = (
            float(one["value"])
            for one in spec["containers"][0]["env"]
            if one["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
        )
        assert longest_s < drain_s < spec["terminationGracePeriodSeconds"]


def test_probes_use_declared_ports(cluster):
    port = yaml.safe_load(RENDERED.read_text())["http_options"]["port"]
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert [entry["containerPort"] for entry in container["ports"]] == [port]
        assert container["readinessProbe"]["httpGet"]["port"] == port
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["readinessProbe"]["httpGet"]["port"] != port, (
        "Serve is deployed only when the head is ready"
    )


def test_only_the_http_port_is_open_to_others(manifest, pods):
    policy = next(document for document in manifest if document["kind"] == "NetworkPolicy")["spec"]
    assert all(
        policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        for pod in pods
    )
    to_all = [rule for rule in policy["ingress"] if "from" not in rule]
    assert to_all == [
        {"ports": [{"port": yaml.safe_load(RENDERED.read_text())["http_options"]["port"]}]}
    ]


def test_ray_has_the_same_version_everywhere(cluster):
    lists = [*(REPOSITORY / "requirements").glob("c*-[0-9]*.txt")]
    assert lists
    for pins in lists:
        assert f"ray=={cluster['rayVersion']}" in pins.read_text().splitlines(), pins.name


@pytest.mark.parametrize(
    ("name", "gpus", "words"),
    [
        (
            "one-node-gpus",
            None,
            "http_options.host is 127.0.0.1, which no other pod can reach: set 0.0.0.0.",
        ),
        (
            "tp4-across-nodes",
            None,
            "a replica of ModelReplica may span several pods: give --gpus-per-pod",
        ),
    ],
)
def test_configurations_that_cannot_be_rendered_are_refused(name, gpus, words):
    with pytest.raises(kuberay.RenderError) as error:
        kuberay.render(config_path(name), IMAGE, gpus)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [
        ("mixed", None, (1, 1, 4)),
        ("tp4-across-nodes", 2, (2, 2, 4)),
        ("embeddings", None, (1, 1, 2)),
    ],
)
def test_gpu_pods(name, gpus, expected):
    """Expected: the GPUs of a pod, and the minimum and maximum number of pods.

    Replicas with fractions of a GPU share a pod. Encoders that may sleep need no pod at the
    minimum.
    """
    rendered = next(yaml.safe_load_all(kuberay.render(config_path(name), IMAGE, gpus)))
    group = rendered["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (int(limits["nvidia.com/gpu"]), group["minReplicas"], group["maxReplicas"]) == expected


def test_a_configuration_without_gpus_is_refused():
    with pytest.raises(kuberay.RenderError, match="no deployment asks for a GPU"):
        kuberay.gpus_of_a_pod([{"name": "CfgRouter"}])


def test_a_proxy_on_the_head_alone_is_refused():
    with pytest.raises(kuberay.RenderError, match="set proxy_location: EveryNode"):
        kuberay.check_http({"http_options": {"host": "0.0.0.0"}, "proxy_location": "HeadOnly"})


# --- the image ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def instructions():
    """(instruction, its words). Continuation lines are joined, comments are left out."""
    lines = [
        line
        for line in (DEPLOY / "Containerfile").read_text().splitlines()
        if not line.startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def of(instructions, name):
    return [words for instruction, words in instructions if instruction == name]


def test_copied_files_exist_and_are_not_ignored(instructions):
    ignored = (REPOSITORY / ".containerignore").read_text().splitlines()
    sources = [
        source
        for words in of(instructions, "COPY")
        if "--from" not in words
        for source in words.split()[:-1]
    ]
    assert len(sources) > 5
    for source in sources:
        assert (REPOSITORY / source).exists(), source
        assert f"!{source}" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == set(sources)


def test_the_image_has_the_chat_model_of_its_own_set_up(instructions):
    """A model of the checkout may be a link to a cache, which the image does not have."""
    ignored = (REPOSITORY / ".containerignore").read_text().splitlines()
    assert ignored.index("models/SmolLM2-135M-Instruct") > ignored.index("!models")
    copies = of(instructions, "COPY")
    whole = next(i for i, words in enumerate(copies) if "--from=build /opt/cfg-serve" in words)
    assert whole < copies.index("models /opt/cfg-serve/models")
    assert "models/SmolLM2-135M-Instruct" in (REPOSITORY / ".gitignore").read_text().splitlines()


def test_files_that_are_run_exist(instructions):
    commands = [*of(instructions, "ENTRYPOINT"), *of(instructions, "CMD"), *of(instructions, "RUN")]
    files = re.findall(r"\b(?:scripts|configs|requirements)/[\w./-]+", " ".join(commands))
    assert {"scripts/setup.py", "configs/cfg.yaml"} <= set(files)
    assert of(instructions, "ENTRYPOINT") == ['["cfg-serve", "serve"]']
    assert all((REPOSITORY / file).is_file() for file in files)


def test_versions_come_from_the_lists_alone(instructions):
    runs = " ".join(of(instructions, "RUN"))
    assert "pip install" not in runs
    assert "==" not in runs


def test_images_are_named_without_a_registry(instructions, cluster):
    assert [words.split()[0] for words in of(instructions, "FROM")] == ["python:3.12-slim"] * 2
    assert cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] == IMAGE
    assert "/" not in IMAGE


def test_the_image_has_the_user_of_the_manifest(instructions, pods):
    (user,) = of(instructions, "USER")
    assert {
        f"{s['runAsUser']}:{s['runAsGroup']}"
        for s in (pod["spec"]["securityContext"] for pod in pods)
    } == {user}
    variables = dict(
        word.split("=", 1) for words in of(instructions, "ENV") for word in shlex.split(words)
    )
    for pod in pods:
        assert variables["HOME"] in {
            mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]
        }


def test_the_image_has_arguments_and_a_health_check(instructions):
    assert {"CFG_SERVE_DEVICE=cpu", "VLLM=", "TORCH_INDEX="} == set(of(instructions, "ARG"))
    (make,) = [words for words in of(instructions, "RUN") if "scripts/setup.py" in words]
    for name in ("CFG_SERVE_DEVICE", "VLLM", "TORCH_INDEX"):
        assert f'{name}="${name}"' in make
    (check,) = of(instructions, "HEALTHCHECK")
    assert "127.0.0.1:8000/health'" in check
