/* Whether Python objects are as they were: asked in front of every call of a model, of thousands of them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Keys and values in turn, the very same ones in the same order. */
static int has_entries(PyObject *dict, PyObject *entries) {
    Py_ssize_t size = PyTuple_GET_SIZE(entries), index = 0, place = 0;
    if (2 * PyDict_Size(dict) != size) return 0;
    for (PyObject *key, *value; PyDict_Next(dict, &place, &key, &value); index += 2)
        if (index >= size || PyTuple_GET_ITEM(entries, index) != key || PyTuple_GET_ITEM(entries, index + 1) != value) return 0;
    return 1;
}

/* Lists of objects and their classes, and of dicts and tuples of what they hold. Called with the interpreter's lock. */
EXPORT int mixlab_unchanged(PyObject *objects, PyObject *kinds, PyObject *dicts, PyObject *entries) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects); i++)
        if ((PyObject *)Py_TYPE(PyList_GET_ITEM(objects, i)) != PyList_GET_ITEM(kinds, i)) return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dicts); i++)
        if (!has_entries(PyList_GET_ITEM(dicts, i), PyList_GET_ITEM(entries, i))) return 0;
    return 1;
}
