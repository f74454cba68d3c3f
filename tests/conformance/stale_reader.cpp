// Reads a parameter without Python's knowing: through ATen, and past it.
#include <ATen/ops/linear.h>
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

static PyObject* linear(PyObject*, PyObject* args) {
  PyObject *x, *weight;
  if (!PyArg_ParseTuple(args, "OO", &x, &weight)) return nullptr;
  try {
    return THPVariable_Wrap(at::linear(THPVariable_Unpack(x), THPVariable_Unpack(weight)));
  } catch (python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

static PyObject* total(PyObject*, PyObject* weight) {
  const at::Tensor& tensor = THPVariable_Unpack(weight);
  const float* data = tensor.const_data_ptr<float>();
  double sum = 0;
  for (int64_t i = 0; i < tensor.numel(); i++) sum += data[i];
  return PyFloat_FromDouble(sum);
}

static PyMethodDef methods[] = {
    {"linear", linear, METH_VARARGS, nullptr},
    {"total", total, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "stale_reader", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

extern "C" PyObject* PyInit_stale_reader() { return PyModule_Create(&definition); }
