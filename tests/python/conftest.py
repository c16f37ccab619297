from compilers import skip_inductor


def pytest_collection_modifyitems(items):
    skip_inductor(items)
