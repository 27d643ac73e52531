"""`horovod.tensorflow` and Keras on TensorFlow, in worlds of 2 and 3 processes: see `in_tensorflow`, `in_keras`."""

from frameworks.behaviours import of_module

# Of the script checks; the others create more models of the same kinds.
QUICK = (
    "test_unreduced_step_is_reported_when_traced_before",
    "test_no_function_remains_wrapped_after_the_check",
)

test_abandoned_objects = of_module("in_threads", [2])
test_tensorflow = of_module("in_tensorflow")
test_tensorflow_in_graphs = of_module("in_tensorflow_graphs")
test_the_data_service = of_module("in_data_service", [2])
test_keras = of_module("in_keras")
test_signatures = of_module("in_signatures", [2])
test_imports = of_module("in_imports", [2])
test_script_checks = of_module("in_script_checks", [2], QUICK)
