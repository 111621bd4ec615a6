// A backend of a process group whose collectives do nothing, so that a benchmark times what a layer does around them.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace {

using at::Tensor;
using Work = c10::intrusive_ptr<c10d::Work>;

struct Done : c10d::Work {
  bool wait(std::chrono::milliseconds) override { return true; }
};

struct Silent : c10d::Backend {
  using Backend::Backend;

  const std::string getBackendName() const override { return "silent"; }

  ::Work allreduce(std::vector<Tensor>&, const c10d::AllreduceOptions&) override { return c10::make_intrusive<Done>(); }

  ::Work _allgather_base(Tensor& filled, Tensor& sent, const c10d::AllgatherOptions&) override {
    // Integers are a question whether ranks agree, before the first step. The others are as this one.
    if (at::isIntegralType(sent.scalar_type(), true)) filled.view({getSize(), -1}).copy_(sent.view({1, -1}));
    return c10::make_intrusive<Done>();
  }

  ::Work allgather_into_tensor_coalesced(
      std::vector<Tensor>& filled, std::vector<Tensor>& sent, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < sent.size(); ++i) _allgather_base(filled[i], sent[i], options);
    return c10::make_intrusive<Done>();
  }
};

// Of the group with this name, what tensors on a GPU are given to.
PyObject* silence(PyObject*, PyObject* name) {
  HANDLE_TH_ERRORS
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) return nullptr;
  const auto group = c10d::resolve_process_group(text);
  const auto backend = c10::make_intrusive<Silent>(group->getRank(), group->getSize());
  // A type that the group does not have: of one that it has, it would keep its own.
  group->setBackend(at::kCUDA, c10d::ProcessGroup::BackendType::UNDEFINED, backend);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {{"silence", silence, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "iternorm_silent", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_iternorm_silent() { return PyModule_Create(&MODULE); }
