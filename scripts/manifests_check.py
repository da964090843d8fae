"""Checks the files for a deployment; see scripts/manifests. The argument is the program, which checks the settings."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import kubernetes_validate
import yaml

MANIFESTS = "deploy/kubernetes/precis.yaml"
COMPOSE = "docker-compose.yml"
UNIT = "deploy/systemd/precis.service"
# The oldest version that has all fields of the manifests, and the newest one whose schemas are known.
KUBERNETES_VERSIONS = ["1.30", kubernetes_validate.latest_version()]
# The probes of Kubernetes end after one second by default.
DEFAULT_PROBE_TIMEOUT = 1
# Postgres permits 100 connections by default, of which three are for superusers.
POSTGRES_CONNECTIONS = 97

errors: list[str] = []


def expect_equal(place: str, value: object, expected: object) -> None:
    if value != expected:
        errors.append(f"{place} is {value!r}: it must be {expected!r}")


def expect_greater(place: str, value: float, minimum: float, reason: str) -> None:
    if value <= minimum:
        errors.append(f"{place} is {value:g}: it must be greater than {minimum:g}, {reason}")


class Image(NamedTuple):
    """The last stage of the Dockerfile."""

    variables: dict[str, str]
    # By name; if there are several of a name, the last one.
    instructions: dict[str, str]


def read_image() -> Image:
    text = Path("Dockerfile").read_text().replace("\\\n", " ")
    lines = text[text.index("\nFROM scratch") :].splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if re.match("[A-Z]+ ", line)]
    variables = " ".join(value for name, value in instructions if name == "ENV")
    return Image(dict(variable.split("=", 1) for variable in variables.split()), dict(instructions))


def read_settings(place: str, variables: Mapping[str, object], file: str = "") -> dict[str, object]:
    """Returns the effective settings by name. The program rejects unknown names and invalid values."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "precis.toml").write_text(file)
        environment = {name: str(value) for name, value in variables.items()}
        command = [PROGRAM, "config"]
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0 or "is not a setting" in result.stderr:
        # Without the settings, the other checks are not possible.
        sys.exit(f"scripts/manifests: {place}: {result.stderr.strip()}")
    lines = (line.split("  # ")[0].split(" = ", 1) for line in result.stdout.splitlines() if not line.startswith("#"))
    return {name: json.loads(value) for name, value in lines}


def seconds(duration: str) -> float:
    units = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)\s*([a-z]+)", duration))


def gibibytes(quantity: str) -> float:
    return float(quantity.removesuffix("Gi")) if quantity.endswith("Gi") else 0


def check_schemas(resources: list[dict]) -> None:
    for version in KUBERNETES_VERSIONS:
        for resource in resources:
            place = f"{resource.get('kind')} with Kubernetes {version}"
            try:
                kubernetes_validate.validate(resource, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                errors.append(f"{place}: {'.'.join(map(str, error.path))}: {error.message}")
            except kubernetes_validate.SchemaNotFoundError as error:
                errors.append(f"{place}: {error.message}")


def check_references(resources: dict[str, dict]) -> None:
    deployment, service = resources["Deployment"], resources["Service"]["spec"]
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    selectors = {
        "the selector of the deployment": deployment["spec"]["selector"]["matchLabels"],
        "the selector of the service": service["selector"],
        "the selector of the disruption budget": resources["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    }
    for constraint in template["spec"].get("topologySpreadConstraints", []):
        selectors["the selector of the spread"] = constraint["labelSelector"]["matchLabels"]
    for place, selector in selectors.items():
        if not selector or not selector.items() <= labels.items():
            errors.append(f"{place} is {selector}: the replicas have the labels {labels}")

    target = resources["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    expected = {key: deployment[key] for key in ("apiVersion", "kind")} | {"name": deployment["metadata"]["name"]}
    expect_equal("the target of the autoscaler", target, expected)
    if "replicas" in deployment["spec"]:
        errors.append("the deployment has `replicas`, which the autoscaler sets: remove it")

    [container] = template["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    probes = {name: container[name]["httpGet"] for name in ("livenessProbe", "readinessProbe", "startupProbe")}
    used = {f"the port of {name}": probe["port"] for name, probe in probes.items()}
    used |= {"the port of the service": port["targetPort"] for port in service["ports"]}
    for place, port in used.items():
        if port not in ports:
            errors.append(f"{place} is {port!r}: the container has {sorted(ports)}")
    open_paths = {"/livez", "/readyz"} & json.loads(Path("openapi/openapi.json").read_text())["paths"].keys()
    for name, probe in probes.items():
        if probe["path"] not in open_paths:
            errors.append(f"the path of {name} is {probe['path']!r}: health checks of precis are {sorted(open_paths)}")

    volumes = sorted(volume["name"] for volume in template["spec"]["volumes"])
    mounted = sorted(mount["name"] for mount in container["volumeMounts"])
    expect_equal("the list of mounted volumes", mounted, volumes)
    for volume in template["spec"]["volumes"]:
        if "configMap" in volume:
            config_map = resources["ConfigMap"]["metadata"]["name"]
            expect_equal(f"the ConfigMap of the volume {volume['name']}", volume["configMap"]["name"], config_map)


def check_pod(resources: dict[str, dict], image: Image) -> None:
    """Checks the replicas against the image and the settings."""
    pod = resources["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    user, group = map(int, image.instructions["USER"].split(":"))
    security = pod["securityContext"]
    for key, expected in {"runAsUser": user, "runAsGroup": group, "fsGroup": group, "runAsNonRoot": True}.items():
        expect_equal(f"securityContext.{key}", security.get(key), expected)
    expect_equal("readOnlyRootFilesystem", container["securityContext"].get("readOnlyRootFilesystem"), True)
    [port] = container["ports"]
    expect_equal("containerPort", str(port["containerPort"]), image.instructions["EXPOSE"])
    expect_equal("the tag of the image", container["image"].rpartition(":")[2], package_version())
    label = re.search(r"^ARG VERSION=(\S+)", Path("Dockerfile").read_text(), re.MULTILINE)
    expect_equal("the default of VERSION in the Dockerfile", label and label[1], package_version())

    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    folder = image.variables["TMPDIR"]
    expect_equal("the working directory of the image", image.instructions["WORKDIR"], folder)
    staging = next((volume for volume in pod["volumes"] if volume["name"] == mounts.get(folder, {}).get("name")), {})
    file = f"{folder}/precis.toml"
    if not {folder, file} <= mounts.keys():
        return errors.append(f"the mounts are {sorted(mounts)}: {folder} and {file} are missing")

    variables = image.variables | {variable["name"]: variable["value"] for variable in container.get("env", [])}
    variables["DATABASE_URL"] = "postgres://precis:password@host/precis"
    key, data = mounts[file].get("subPath"), resources["ConfigMap"]["data"]
    if key not in data:
        return errors.append(f"the subPath of {file} is {key!r}: the ConfigMap has {sorted(data)}")
    settings = read_settings(MANIFESTS, variables, data[key])
    expect_equal("the port of server.bind", settings["server.bind"].rpartition(":")[2], str(port["containerPort"]))
    room = gibibytes(staging.get("emptyDir", {}).get("sizeLimit", "")) * 2**30
    expect_greater(f"the size of {folder}", room, settings["limits.max_import_bytes"] * 2, "that of two imports")
    delay = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = seconds(settings["server.shutdown_grace"]) + delay
    period = pod["terminationGracePeriodSeconds"]
    expect_greater("terminationGracePeriodSeconds", period, grace, "the delay of preStop and server.shutdown_grace")
    timeout = container["readinessProbe"].get("timeoutSeconds", DEFAULT_PROBE_TIMEOUT)
    acquire_timeout = seconds(settings["database.acquire_timeout"])
    expect_greater("timeoutSeconds of the readiness probe", timeout, acquire_timeout, "database.acquire_timeout")
    surge = resources["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
    replicas = resources["HorizontalPodAutoscaler"]["spec"]["maxReplicas"] + surge
    connections = replicas * settings["database.max_connections"]
    expect_greater("the number of connections of Postgres", POSTGRES_CONNECTIONS, connections, "that of all replicas")


def check_compose(image: Image) -> None:
    compose = yaml.safe_load(Path(COMPOSE).read_text())
    service = compose["services"]["precis"]
    # Replaces ${NAME:-default}, as Compose does.
    own = {name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for name, value in service["environment"].items()}
    settings = read_settings(COMPOSE, image.variables | own)
    grace = seconds(settings["server.shutdown_grace"])
    expect_greater(f"{COMPOSE}: stop_grace_period", seconds(service["stop_grace_period"]), grace, "server.shutdown_grace")
    expect_equal(f"{COMPOSE}: read_only", service.get("read_only"), True)
    folders = [volume.split(":")[1] for volume in service["volumes"]]
    expect_equal(f"{COMPOSE}: the volumes", folders, [image.variables["TMPDIR"]])
    mounted = {mount.split(":")[0] for service in compose["services"].values() for mount in service.get("volumes", [])}
    for source in mounted:
        if not (Path(source).exists() if source.startswith(".") else source in compose["volumes"]):
            errors.append(f"{COMPOSE}: the volume {source} does not exist")


def check_unit() -> None:
    lines = [line.split("=", 1) for line in Path(UNIT).read_text().splitlines() if re.match(r"\w+=", line)]
    variables = dict(value.split("=", 1) for key, value in lines if key == "Environment")
    settings = read_settings(UNIT, variables)
    grace = seconds(settings["server.shutdown_grace"])
    expect_greater(f"{UNIT}: TimeoutStopSec", float(dict(lines)["TimeoutStopSec"]), grace, "server.shutdown_grace")


def package_version() -> str:
    return re.findall(r'^version = "(.*)"', Path("Cargo.toml").read_text(), re.MULTILINE)[0]


[PROGRAM] = [str(Path(argument).resolve()) for argument in sys.argv[1:]]
resources = list(yaml.safe_load_all(Path(MANIFESTS).read_text()))
check_schemas(resources)
# The other checks rely on the schemas.
if not errors:
    image = read_image()
    by_kind = {resource["kind"]: resource for resource in resources}
    check_references(by_kind)
    check_pod(by_kind, image)
    check_compose(image)
    check_unit()
for error in errors:
    print(f"scripts/manifests: {error}", file=sys.stderr)
sys.exit(1 if errors else 0)
