"""What importing costs, and what is public."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "numpy", "pandas", "sklearn", "tensorflow", "jax", "lightning", "transformers")
CLOUD = ("ray", "boto3", "botocore", "obstore", "fsspec", "pyarrow", "google.cloud", "azure")
ERRORS = {
    "AlreadyExists",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointFailed",
    "CheckpointForgotten",
    "ConfigError",
    "DriverAlive",
    "EngineError",
    "ExperimentError",
    "HoldfastError",
    "JournalDamaged",
    "NotFound",
    "OutsideRunError",
    "OwnershipLost",
    "StorageError",
    "TrainingFailedError",
}
PUBLIC = {
    "holdfast": ERRORS | {"Checkpoint", "__version__", "storage", "train"},
    "holdfast.train": {
        "Checkpoint",
        "CheckpointConfig",
        "DataParallelTrainer",
        "FailureConfig",
        "Result",
        "RunConfig",
        "ScalingConfig",
        "TrainContext",
        "TrainingFailedError",
        "checkpoint_dir",
        "get_checkpoint",
        "get_context",
        "report",
    },
    "holdfast.train.torch": {"TorchTrainer", "get_device", "prepare_data_loader", "prepare_model"},
}


def loaded_after(statement: str) -> set[str]:
    """The modules of a fresh interpreter after `statement`, without those it starts with."""
    code = f"import sys; before = set(sys.modules); {statement}; print('\\n'.join(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    return set(run.stdout.split())


def test_importing_holdfast_loads_nothing_but_itself_and_the_standard_library():
    loaded = loaded_after("import holdfast")
    assert loaded.isdisjoint({*FRAMEWORKS, *CLOUD, "msgspec", "xxhash", "cloudpickle", "asyncio", "subprocess"})
    assert {name for name in loaded if name.startswith("holdfast")} == {"holdfast"}


def test_importing_train_loads_no_framework_and_no_cloud_client():
    assert loaded_after("from holdfast import train").isdisjoint({*FRAMEWORKS, *CLOUD, "asyncio"})


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these_and_all_of_them_are_there(module):
    imported = importlib.import_module(module)
    assert set(imported.__all__) == PUBLIC[module]
    assert len(imported.__all__) == len(set(imported.__all__))
    assert all(getattr(imported, name) is not None for name in imported.__all__)


def test_every_exception_is_drawn_in_the_tree_of_errors():
    errors = importlib.import_module("holdfast.errors")
    assert set(errors.__doc__.split()) >= ERRORS
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert kinds == ERRORS


def test_a_name_that_is_not_there_is_named():
    import holdfast

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        holdfast.nothing  # noqa: B018
    assert set(holdfast.__all__) <= set(dir(holdfast))
