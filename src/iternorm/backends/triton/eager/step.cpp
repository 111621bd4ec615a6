// A training step of one layer without Python: memory, launches, and a node of autograd's graph.
//
// Which kernels are launched with what was recorded from Python (record.py). Nothing is known of them here but where
// each argument comes from. What a step was not recorded for is left to Python.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>

#include <memory>
#include <string>
#include <vector>

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The tensors of a pass, by the numbers that record.py gives them.
enum Forward { INPUT, OUTPUT, STATE, WEIGHT, BIAS, MEAN, MATRIX, RESIDUAL, WORK, COUNT, MEETING, NUM_FORWARD };
enum Backward {
  B_INPUT, GRADIENT, B_OUTPUT, B_STATE, INPUT_GRADIENT, B_WEIGHT, WEIGHT_GRADIENT, BIAS_GRADIENT, PASSED, B_WORK,
  B_MEETING, NUM_BACKWARD
};
// Those that may have a gradient.
const int INPUTS[] = {INPUT, WEIGHT, BIAS, RESIDUAL};

// Bytes after the beginning of a tensor, or with a negative number of that the bits of the value itself.
struct Argument {
  int tensor;
  uint64_t value;
};

struct Launch {
  CUfunction function;
  unsigned grid[2], threads, shared;
  std::vector<CUlaunchAttribute> attributes;
  std::vector<Argument> arguments;
};

// Of a tensor that a pass is given; `numel` is 0 where there is none.
struct Expected {
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
};

using Launcher = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);

struct Step : torch::CustomClassHolder {
  Launcher launcher;
  std::vector<Launch> forward, backward;
  // Elements of fp32.
  int64_t state, forward_work, backward_work;
  bool relu, keeps_gradient, meets;
  at::Device device = at::kCPU;
  std::vector<int64_t> sizes, strides;
  Expected given[NUM_FORWARD];
  // The backward in Python.
  PyObject* gradients = nullptr;

  ~Step() override {
    if (gradients != nullptr && Py_IsInitialized()) {
      PyGILState_STATE held = PyGILState_Ensure();
      Py_DECREF(gradients);
      PyGILState_Release(held);
    }
  }
};

void* current_stream(at::Device device) {
  if (!device.is_cuda()) return nullptr;
  c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStreamNativeHandle(guard.getStream(device));
}

// Whether a step may take the addresses: launches were compiled for tensors aligned to 16 bytes.
template <size_t N>
bool addresses_of(const Tensor* const (&tensors)[N], uint64_t (&addresses)[N]) {
  uint64_t together = 0;
  for (size_t i = 0; i < N; ++i) {
    addresses[i] = tensors[i]->defined() ? reinterpret_cast<uint64_t>(tensors[i]->const_data_ptr()) : 0;
    together |= addresses[i];
  }
  return (together & 15) == 0;
}

void launch_all(const Step& step, const std::vector<Launch>& launches, void* stream, const uint64_t* addresses) {
  std::vector<uint64_t> values;
  std::vector<void*> pointers;
  for (const Launch& launch : launches) {
    const size_t count = launch.arguments.size();
    values.resize(count);
    pointers.resize(count);
    for (size_t i = 0; i < count; ++i) {
      const Argument& argument = launch.arguments[i];
      values[i] = argument.value + (argument.tensor < 0 ? 0 : addresses[argument.tensor]);
      pointers[i] = &values[i];
    }
    CUlaunchConfig config{};
    config.gridDimX = launch.grid[0];
    config.gridDimY = launch.grid[1];
    config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = launch.threads;
    config.sharedMemBytes = launch.shared;
    config.hStream = static_cast<CUstream>(stream);
    config.attrs = const_cast<CUlaunchAttribute*>(launch.attributes.data());
    config.numAttrs = launch.attributes.size();
    const CUresult error = step.launcher(&config, launch.function, pointers.data(), nullptr);
    TORCH_CHECK(error == CUDA_SUCCESS, "a launch of a whitening kernel failed: CUDA error ", static_cast<int>(error));
  }
}

Tensor empty_floats(const Tensor& like, int64_t count) {
  return at::empty({count}, like.options().dtype(at::kFloat));
}

// Where the programs of a launch meet: a zero that no other launch uses.
Tensor meeting_place(const Step& step, const Tensor& like) {
  return step.meets ? at::zeros({4}, like.options().dtype(at::kInt)) : Tensor();
}

Tensor in_strides(const Tensor& tensor, const Tensor& like) {
  if (!tensor.defined() || tensor.strides() == like.strides()) return tensor;
  return at::empty_like(like).copy_(tensor);
}

bool is_plain(const Tensor& tensor) {
  return tensor.layout() == at::kStrided && !at::isTensorSubclassLike(tensor) && !tensor._fw_grad(0).defined();
}

// With the GIL.
PyObject* wrapped(const Tensor& tensor) {
  if (tensor.defined()) return THPVariable_Wrap(tensor);
  Py_RETURN_NONE;
}

// Whether the tensors are those that the step was recorded for.
bool suits(const Step& step, const Tensor (&given)[NUM_FORWARD]) {
  const Tensor& x = given[INPUT];
  if (x.sizes() != at::IntArrayRef(step.sizes) || x.strides() != at::IntArrayRef(step.strides)) return false;
  if (at::GradMode::is_enabled() && !x.requires_grad()) return false;
  for (int i = 0; i < NUM_FORWARD; ++i) {
    const Expected& expected = step.given[i];
    if (given[i].defined() != (expected.numel > 0)) return false;
    if (!given[i].defined()) continue;
    if (given[i].numel() != expected.numel || given[i].scalar_type() != expected.dtype) return false;
    if (given[i].device() != step.device || !is_plain(given[i])) return false;
    // An activation lies in memory as x does, or is copied. All else is contiguous.
    if (i != INPUT && i != RESIDUAL && !given[i].is_contiguous()) return false;
  }
  return !given[RESIDUAL].defined() || given[RESIDUAL].sizes() == x.sizes();
}

// What a forward computes and its backward needs.
struct Pass {
  c10::intrusive_ptr<Step> step;
  Tensor given[NUM_FORWARD];
  Tensor y, state;

  // Whether the kernels were launched, or the step was recorded for something else.
  bool launch() {
    at::AutoDispatchBelowADInplaceOrView below;
    if (!suits(*step, given)) return false;
    const Tensor& x = given[INPUT];
    const c10::OptionalDeviceGuard device(x.device());
    y = at::empty_like(x);
    state = empty_floats(x, step->state);
    const Tensor work = empty_floats(x, step->forward_work), meeting = meeting_place(*step, x);
    const Tensor residual = in_strides(given[RESIDUAL], x);
    const Tensor* const tensors[NUM_FORWARD] = {
        &x, &y, &state, &given[WEIGHT], &given[BIAS], &given[MEAN], &given[MATRIX], &residual, &work, &given[COUNT],
        &meeting};
    uint64_t addresses[NUM_FORWARD];
    if (!addresses_of(tensors, addresses)) return false;
    launch_all(*step, step->forward, current_stream(x.device()), addresses);
    return true;
  }
};

using Optional = std::optional<Tensor>;

Optional optional(const Tensor& tensor) {
  return tensor.defined() ? Optional(tensor) : Optional();
}

// The differentiable operation. Its forward has been launched before: this is what its backward needs.
struct Whiten : torch::autograd::Function<Whiten> {
  static Tensor forward(
      AutogradContext* ctx, const Tensor& x, const Optional& weight, const Optional& bias, const Optional&, Pass* pass) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["step"] = c10::IValue::make_capsule(pass->step);
    const Tensor output = pass->step->relu ? pass->y : Tensor();
    ctx->save_for_backward({x, weight.value_or(Tensor()), bias.value_or(Tensor()), pass->state, output});
    return pass->y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const Tensor& given = gradients[0];
    if (!given.defined()) return variable_list(5);
    const auto step = c10::static_intrusive_pointer_cast<Step>(ctx->saved_data["step"].toCapsule());
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& x = saved[0];
    // Absent tensors are not counted among the inputs.
    bool needs[4];
    size_t input = 0;
    for (int i = 0; i < 4; ++i) needs[i] = step->given[INPUTS[i]].numel > 0 && ctx->needs_input_grad(input++);
    const bool as_recorded = needs[0] && !at::GradMode::is_enabled() && is_plain(given) && is_plain(x) &&
        !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
        given.scalar_type() == x.scalar_type() && given.device() == x.device() &&
        x.strides() == at::IntArrayRef(step->strides);
    variable_list found(5);
    if (!as_recorded || !launch(*step, given, saved, needs, found)) in_python(*step, given, saved, needs, found);
    return found;
  }

  static bool launch(
      const Step& step, const Tensor& given, const variable_list& saved, const bool* needs, variable_list& found) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &state = saved[3];
    const Tensor gradient = in_strides(given, x), positive = in_strides(saved[4], x);
    const Tensor dx = at::empty_like(x), passed = step.keeps_gradient ? at::empty_like(x) : Tensor();
    const Tensor work = empty_floats(x, step.backward_work), meeting = meeting_place(step, x);
    const Tensor d_bias = empty_floats(x, x.size(1)), d_weight = weight.defined() ? at::empty_like(d_bias) : Tensor();
    const Tensor* const tensors[NUM_BACKWARD] = {
        &x, &gradient, &positive, &state, &dx, &weight, &d_weight, &d_bias, &passed, &work, &meeting};
    uint64_t addresses[NUM_BACKWARD];
    if (!addresses_of(tensors, addresses)) return false;
    launch_all(step, step.backward, current_stream(x.device()), addresses);
    found[0] = dx;
    if (needs[1]) found[1] = d_weight.to(weight.scalar_type());
    if (needs[2]) found[2] = d_bias.to(bias.scalar_type());
    // Without an activation what was added has the gradient of the output.
    if (needs[3]) found[3] = step.relu ? passed : given;
    return true;
  }

  static void in_python(
      const Step& step, const Tensor& given, const variable_list& saved, const bool* needs, variable_list& found) {
    pybind11::gil_scoped_acquire gil;
    const auto asked = [needs](int i) { return needs[i] ? Py_True : Py_False; };
    THPObjectPtr result(PyObject_CallFunction(
        step.gradients, "NNNNNN(OOOO)", wrapped(given), wrapped(saved[0]), wrapped(saved[1]), wrapped(saved[2]),
        wrapped(saved[3]), wrapped(saved[4]), asked(0), asked(1), asked(2), asked(3)));
    for (int i = 0; result && i < 4; ++i) {
      THPObjectPtr item(PySequence_GetItem(result, i));
      if (item && item.get() != Py_None) found[i] = THPVariable_Unpack(item.get());
    }
    if (PyErr_Occurred()) {
      python_error error;
      error.persist();
      throw error;
    }
  }
};

// What record.py hands over: function, grid, threads, shared memory, dependent, cooperative, arguments.
std::vector<Launch> launches_from(PyObject* described) {
  std::vector<Launch> launches;
  for (Py_ssize_t i = 0; i < PyTuple_Size(described); ++i) {
    Launch launch;
    unsigned long long function;
    int dependent, cooperative;
    PyObject* arguments;
    if (!PyArg_ParseTuple(
            PyTuple_GetItem(described, i), "K(II)IIppO!", &function, &launch.grid[0], &launch.grid[1], &launch.threads,
            &launch.shared, &dependent, &cooperative, &PyTuple_Type, &arguments))
      throw python_error();
    launch.function = reinterpret_cast<CUfunction>(function);
    const auto attribute = [&launch](CUlaunchAttributeID id) {
      CUlaunchAttribute added{};
      added.id = id;
      // Both are a flag, one of which is an integer of the same size under another name.
      added.value.cooperative = 1;
      launch.attributes.push_back(added);
    };
    if (dependent) attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
    if (cooperative) attribute(CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
    for (Py_ssize_t j = 0; j < PyTuple_Size(arguments); ++j) {
      Argument argument;
      unsigned long long value;
      if (!PyArg_ParseTuple(PyTuple_GetItem(arguments, j), "iK", &argument.tensor, &value)) throw python_error();
      argument.value = value;
      launch.arguments.push_back(argument);
    }
    launches.push_back(std::move(launch));
  }
  return launches;
}

const char* const NAME = "iternorm.step";

void discard(PyObject* capsule) {
  delete static_cast<c10::intrusive_ptr<Step>*>(PyCapsule_GetPointer(capsule, NAME));
}

// prepare(launcher, forward, backward, (state, forward work, backward work), (relu, keeps gradient, meets), gradients,
//         (x, y, ...)): one of those by number, a tensor like which it has to be, or None.
PyObject* prepare(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  auto step = c10::make_intrusive<Step>();
  unsigned long long launcher;
  PyObject *forward, *backward, *gradients, *examples;
  long long state, forward_work, backward_work;
  int relu, keeps_gradient, meets;
  if (!PyArg_ParseTuple(
          arguments, "KO!O!(LLL)(ppp)OO!", &launcher, &PyTuple_Type, &forward, &PyTuple_Type, &backward, &state,
          &forward_work, &backward_work, &relu, &keeps_gradient, &meets, &gradients, &PyTuple_Type, &examples))
    return nullptr;
  step->launcher = reinterpret_cast<Launcher>(launcher);
  step->forward = launches_from(forward);
  step->backward = launches_from(backward);
  step->state = state, step->forward_work = forward_work, step->backward_work = backward_work;
  step->relu = relu, step->keeps_gradient = keeps_gradient, step->meets = meets;
  Py_INCREF(gradients);
  step->gradients = gradients;
  for (Py_ssize_t i = 0; i < PyTuple_Size(examples); ++i) {
    PyObject* example = PyTuple_GetItem(examples, i);
    if (example == Py_None) continue;
    const Tensor& tensor = THPVariable_Unpack(example);
    step->given[i] = Expected{tensor.numel(), tensor.scalar_type()};
    if (i == INPUT) {
      step->device = tensor.device();
      step->sizes = tensor.sizes().vec();
      step->strides = tensor.strides().vec();
    }
  }
  return PyCapsule_New(new c10::intrusive_ptr<Step>(std::move(step)), NAME, discard);
  END_HANDLE_TH_ERRORS
}

// whiten(step, x, weight, bias, residual, mean, matrix, count): y, or None where the step is for something else.
PyObject* whiten_in_python(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const int order[] = {INPUT, WEIGHT, BIAS, RESIDUAL, MEAN, MATRIX, COUNT};
  if (count != 8) {
    PyErr_Format(PyExc_TypeError, "whiten takes 8 arguments, got %zd", count);
    return nullptr;
  }
  auto* step = static_cast<c10::intrusive_ptr<Step>*>(PyCapsule_GetPointer(arguments[0], NAME));
  if (step == nullptr) return nullptr;
  Pass pass{*step};
  for (int i = 0; i < 7; ++i) {
    PyObject* argument = arguments[1 + i];
    if (argument == Py_None) continue;
    if (!THPVariable_Check(argument)) Py_RETURN_NONE;
    pass.given[order[i]] = THPVariable_Unpack(argument);
  }
  Tensor y;
  {
    pybind11::gil_scoped_release no_gil;
    if (pass.launch()) {
      const Optional weight = optional(pass.given[WEIGHT]), bias = optional(pass.given[BIAS]);
      y = Whiten::apply(pass.given[INPUT], weight, bias, optional(pass.given[RESIDUAL]), &pass);
    }
  }
  return wrapped(y);
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"prepare", prepare, METH_VARARGS, "A step from what was recorded of it."},
    {"whiten", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(whiten_in_python)), METH_FASTCALL,
     "The output of a layer in training, or None where the step is for something else."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "iternorm_step", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_iternorm_step() {
  return PyModule_Create(&MODULE);
}
