"""Find the frameworks and the CUDA compiler that setup.py builds operators for.

The switches ``DEEPREDUCE_WITH_*`` and ``DEEPREDUCE_WITHOUT_*`` say what must be there and what is
left out. This file needs only Python.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import nvcc

# Prints what a torch operator library needs. It does not import torch.utils.cpp_extension, which
# needs setuptools.
ASK_TORCH = """
import importlib.util, json, os
if importlib.util.find_spec("torch") is None: raise SystemExit("No module named 'torch'")
import torch
root = os.path.dirname(torch.__file__)
print(json.dumps({"version": torch.__version__, "root": root, "cxx11_abi": int(torch.compiled_with_cxx11_abi()), "cuda": torch.version.cuda}))
"""
ASK_TENSORFLOW = """
import importlib.util, json, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
if importlib.util.find_spec("tensorflow") is None: raise SystemExit("No module named 'tensorflow'")
import tensorflow
cuda = tensorflow.sysconfig.get_build_info().get("cuda_version") if tensorflow.test.is_built_with_cuda() else None
print(json.dumps({"version": tensorflow.__version__, "compile": tensorflow.sysconfig.get_compile_flags(), "link": tensorflow.sysconfig.get_link_flags(), "cuda": cuda}))
"""


class BuildError(SystemExit):
    """An error that ends the build with one readable message instead of a traceback."""

    def __init__(self, message):
        super().__init__(f"deepreduce_hvd: {message}")


def say(message):
    print(f"deepreduce_hvd: {message}", flush=True)


def switch(name):
    """Return whether an environment variable is set to 1."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise BuildError(f"{name}: expected 1, 0 or nothing, got {value!r}")
    return value == "1"


def switches(name):
    """Return whether something is asked for, and whether it is to be left out."""
    with_it, without_it = f"DEEPREDUCE_WITH_{name}", f"DEEPREDUCE_WITHOUT_{name}"
    wanted, unwanted = switch(with_it), switch(without_it)
    if wanted and unwanted:
        raise BuildError(f"{with_it} and {without_it}: expected one of them, got both")
    return wanted, unwanted


def ask(question):
    """Ask the target interpreter a question in a separate process.

    Under pip's build isolation this process cannot see the packages of the environment that it
    builds for: pip hides them through PYTHONPATH and PYTHONNOUSERSITE. So the same interpreter is
    asked first without these two variables, then with them, because the user may have put a
    framework on PYTHONPATH.

    Returns:
        The answer or None, and the reason why there is no answer.
    """
    hidden_by_pip = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")
    clean = {name: value for name, value in os.environ.items() if name not in hidden_by_pip}
    reasons = []
    for environment in (clean, dict(os.environ)):
        # a neutral directory, because -c puts the current one first on the module path
        answer = subprocess.run(
            [sys.executable, "-c", question],
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
        )
        if answer.returncode == 0:
            return json.loads(answer.stdout.splitlines()[-1]), None
        reasons.append(
            (answer.stderr.strip() or f"exit status {answer.returncode}").splitlines()[-1]
        )
    return None, reasons[0]


def find_framework(name, question, sources):
    """Return the framework's answer, or None with a message if its operators are not built."""
    wanted, unwanted = switches(name.upper())
    if unwanted:
        say(f"skipping the {name} ops: DEEPREDUCE_WITHOUT_{name.upper()}=1")
        return None
    if not sources:
        if wanted:
            raise BuildError(f"DEEPREDUCE_WITH_{name.upper()}=1: no {name} ops in this version")
        say(f"skipping the {name} ops: no {name} ops in this version")
        return None
    answer, reason = ask(question)
    if answer is None and wanted:
        raise BuildError(
            f"DEEPREDUCE_WITH_{name.upper()}=1: expected {name} in {sys.executable}, got: {reason}. "
            "Install it there first. A tool that builds with another Python than the one that it "
            "installs for, such as python -m build, needs its option --no-isolation for this"
        )
    if answer is None:
        say(f"skipping the {name} ops: {sys.executable} has no usable {name} ({reason})")
        return None
    say(f"building the {name} ops for {name} {answer['version']}")
    return answer


def output_of(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(
            f"expected exit status 0, got {done.returncode} from: "
            f"{shlex.join(command)}\n{done.stderr}"
        )
    return done.stdout + done.stderr


def code_options(path, version):
    """Return nvcc's options for the architectures to compile for.

    They include PTX of the newest one, which later devices compile when they load it.
    """
    known = nvcc.known_architectures(path)
    asked = re.split(r"[\s,;]+", os.environ.get("DEEPREDUCE_CUDA_ARCHITECTURES", "").strip())
    if asked == [""]:
        left_out = [name for name in nvcc.ARCHITECTURES if name not in known]
        if left_out:
            say(f"nvcc {version} does not compile for {' '.join(left_out)}: left out")
        asked = [name for name in nvcc.ARCHITECTURES if name in known]
        asked[-1:] = [f"{name}+PTX" for name in asked[-1:]]
    options = []
    for name in asked:
        form = re.fullmatch(r"(\d+\.\d)([af]?)(\+PTX)?", name)
        if form is None or form[1] not in known:
            choices = " ".join(sorted(known, key=float))
            raise BuildError(
                f"DEEPREDUCE_CUDA_ARCHITECTURES: expected some of {choices}, each with "
                f"+PTX or without, got {name!r}"
            )
        options += nvcc.code_options(form[1] + form[2], ptx=bool(form[3]))
    say(f"compiling CUDA kernels for {' '.join(asked)}")
    return options


def why_no_cuda(name, framework, path, nvcc_version):
    """Return why a framework's operators cannot have CUDA kernels, or None."""
    if framework["cuda"] is None:
        return (
            f"expected {name} with CUDA, got {name} {framework['version']}, which is built without"
        )
    major = framework["cuda"].partition(".")[0]
    # a driver that supports the framework's CUDA also supports kernels of that CUDA
    if path is not None and major != nvcc_version.partition(".")[0]:
        return (
            f"expected nvcc of CUDA {major} as {name} {framework['version']} has, got {path} "
            f"of CUDA {nvcc_version}"
        )
    return None


def find_cuda(frameworks, has_kernels):
    """Return what the CUDA build needs, or None with a message if there are no CUDA operators.

    Args:
        frameworks: {name: answer} of the frameworks that are found.
        has_kernels: whether there are sources of CUDA kernels.

    Returns:
        A dict with the frameworks that get CUDA operators, nvcc, its options for the
        architectures, and its include and library directories.
    """
    wanted, unwanted = switches("CUDA")
    if unwanted:
        say("skipping the CUDA operators: DEEPREDUCE_WITHOUT_CUDA=1")
        return None
    path, nowhere = nvcc.look()
    version = re.search(r"release (\d+\.\d+)", output_of(path, "--version"))[1] if path else None
    reasons = {
        name: why_no_cuda(name, answer, path, version) for name, answer in frameworks.items()
    }
    problems = list(reasons.values()) if None not in reasons.values() else []
    if not frameworks:
        problems.append("expected PyTorch or TensorFlow with CUDA, got the operators of neither")
    if path is None:
        problems.append(f"expected nvcc, got {nowhere}")
    if not has_kernels:
        problems = ["no CUDA kernels in this version"]
    if problems and wanted:
        raise BuildError(f"DEEPREDUCE_WITH_CUDA=1: {'; '.join(problems)}")
    if problems:
        say(f"skipping the CUDA operators: {'; '.join(problems)}")
        return None
    for name, reason in reasons.items():
        if reason is None:
            say(f"building the CUDA operators for {name} with {path} of CUDA {version}")
        else:
            say(f"skipping the CUDA operators for {name}: {reason}")
    # lists its include and library directories
    plan = output_of(path, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null")
    return {
        "frameworks": {name for name, reason in reasons.items() if reason is None},
        "nvcc": path,
        "code": code_options(path, version),
        "include": re.findall(r'"-I([^"]+)"', plan),
        "libraries": re.findall(r'"-L([^"]+)"', plan),
    }
