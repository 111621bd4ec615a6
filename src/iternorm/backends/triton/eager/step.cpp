// Passes of a layer without Python: memory, launches, autograd's node, and the operators that compiled graphs call.
//
// Which kernels a pass launches with what was recorded from Python (record.py). Nothing is known of them here but where
// each argument comes from. What a pass was not recorded for is left to Python.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/library.h>

// Set by library.py where torch was built with process groups.
#ifdef WITH_PROCESS_GROUPS
#if __has_include(<torch/csrc/distributed/c10d/GroupRegistry.hpp>)
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#else
#undef WITH_PROCESS_GROUPS
#endif
#endif

namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The tensors of a pass, by the numbers that record.py gives them. A rank sends its moments and is given those of all.
namespace forward {
enum { INPUT, OUTPUT, STATE, WEIGHT, BIAS, MEAN, MATRIX, RESIDUAL, WORK, COUNT, MEETING, SENT, GATHERED, SIZE };
}
namespace backward {
enum { INPUT, GRADIENT, OUTPUT, STATE, D_INPUT, WEIGHT, D_WEIGHT, D_BIAS, PASSED, WORK, MEETING, MORE, SUMS, SIZE };
}

// How a tensor of a pass comes about.
enum Origin { ABSENT, GIVEN, LIKE_INPUT, FLOATS, ZEROS, COUNTERS };

struct Part {
  int origin = ABSENT;
  int64_t numel = 0;
  // Of one that is given, and whether it lies in memory as the input does.
  at::ScalarType dtype = at::kFloat;
  bool is_activation = false;
};

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

using Launcher = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);

// An object of Python's that may be released by any thread.
struct Held {
  PyObject* object = nullptr;

  void hold(PyObject* other) {
    Py_INCREF(other);
    Py_XDECREF(std::exchange(object, other));
  }
  ~Held() {
    if (object == nullptr || !Py_IsInitialized()) return;
    pybind11::gil_scoped_acquire gil;
    Py_DECREF(object);
  }
};

// A collective in the middle of a pass: an all-gather, or a sum in place where nothing else is sent.
struct Exchange {
  // After so many launches; negative is no collective.
  int after = -1;
  // Tensors by number; what is sent is negative for a sum.
  int filled = -1, sent = -1;
  // The name of a process group to be asked here, or nothing. Python can always ask it.
  std::string group;
  Held in_python;
};

struct Pass : torch::CustomClassHolder {
  Launcher launcher;
  std::vector<Launch> launches;
  Exchange exchange;
  std::vector<Part> parts;
  at::Device device = at::kCPU;
  std::vector<int64_t> sizes, strides;
  // Where the kernels cannot read the input as it is, the strides of what they read and write.
  std::vector<int64_t> read_strides;
  // Whether TF32 was allowed, where that matters.
  std::optional<bool> tf32;
};

void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// With the GIL.
PyObject* wrapped(const Tensor& tensor) {
  if (tensor.defined()) return THPVariable_Wrap(tensor);
  Py_RETURN_NONE;
}

// With the GIL.
PyObject* wrapped(const variable_list& tensors) {
  PyObject* tuple = PyTuple_New(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) PyTuple_SET_ITEM(tuple, i, wrapped(tensors[i]));
  return tuple;
}

void* current_stream(at::Device device) {
  if (!device.is_cuda()) return nullptr;
  c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStreamNativeHandle(guard.getStream(device));
}

// A gradient of zeros may have no memory: the backward of `torch.sgn` makes such ones.
bool is_plain(const Tensor& tensor) {
  return tensor.layout() == at::kStrided && !at::isTensorSubclassLike(tensor) && !tensor._is_zerotensor() &&
         !tensor._fw_grad(0).defined();
}

// By name in torch 2.9, by number since.
template <class Context, class Precision, class Backend, class Op>
bool is_tf32(const Context& context, Precision (Context::*ask)(Backend, Op) const) {
  if constexpr (std::is_enum_v<Precision>)
    return (context.*ask)(Backend::CUDA, Op::MATMUL) == Precision::TF32;
  else
    return (context.*ask)("cuda", "matmul") == "tf32";
}

// Since torch 2.9 there are two ways to allow TF32. The older one's getter fails after the newer; the newer one's knows
// of both.
template <class Context>
bool allows_tf32(const Context& context) {
  if constexpr (requires { &Context::float32Precision; })
    return is_tf32(context, &Context::float32Precision);
  else
    return context.float32MatmulPrecision() != at::Float32MatmulPrecision::HIGHEST;
}

// Whether what is given is what the pass was recorded for. The input is the first.
bool suits(const Pass& pass, const variable_list& tensors) {
  const Tensor& input = tensors[0];
  if (input.sizes() != at::IntArrayRef(pass.sizes) || input.strides() != at::IntArrayRef(pass.strides)) return false;
  for (size_t i = 0; i < pass.parts.size(); ++i) {
    const Part& part = pass.parts[i];
    const Tensor& tensor = tensors[i];
    if (tensor.defined() != (part.origin == GIVEN)) return false;
    if (!tensor.defined()) continue;
    if (tensor.numel() != part.numel || tensor.scalar_type() != part.dtype || tensor.device() != pass.device) return false;
    if (!is_plain(tensor)) return false;
    if (part.is_activation ? tensor.sizes() != input.sizes() : i > 0 && !tensor.is_contiguous()) return false;
  }
  return !pass.tf32.has_value() || pass.tf32 == allows_tf32(at::globalContext());
}

Tensor made(const Part& part, const Tensor& input) {
  switch (part.origin) {
    case LIKE_INPUT: return at::empty_like(input);
    case FLOATS: return at::empty({part.numel}, input.options().dtype(at::kFloat));
    case ZEROS: return at::zeros({part.numel}, input.options().dtype(at::kFloat));
    case COUNTERS: return at::zeros({part.numel}, input.options().dtype(at::kInt));
    default: return Tensor();
  }
}

CUresult launch(const Pass& pass, const Launch& launch, void* stream, const std::vector<uint64_t>& addresses) {
  constexpr size_t MOST = 64;
  const size_t count = launch.arguments.size();
  TORCH_INTERNAL_ASSERT(count <= MOST);
  uint64_t values[MOST];
  void* pointers[MOST];
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
  return pass.launcher(&config, launch.function, pointers, nullptr);
}

#ifdef WITH_PROCESS_GROUPS
// The newer versions then use the current stream.
template <class Options>
void synchronous(Options& options) {
  if constexpr (requires { options.asyncOp; }) options.asyncOp = false;
}

// As `torch.distributed` asks a group, which has a new name for an all-gather since torch 2.13.
template <class Group>
c10::intrusive_ptr<c10d::Work> asked(Group& group, const Tensor& filled, const Tensor& sent) {
  if (!sent.defined()) {
    std::vector<Tensor> summed = {filled};
    c10d::AllreduceOptions options;
    synchronous(options);
    return group.allreduce(summed, options);
  }
  c10d::AllgatherOptions options;
  synchronous(options);
  // A row for each rank: backends that copy rather than communicate fill it in one go.
  Tensor row = sent.view({1, sent.numel()}), rows = filled.view({-1, sent.numel()});
  if constexpr (requires { group.all_gather_single(rows, row, options); })
    return group.all_gather_single(rows, row, options);
  else
    return group._allgather_base(rows, row, options);
}
#endif

// Without Python; false, with nothing done, for a group that is a class of Python's, whose methods C++ does not reach.
bool exchanged_here(const std::string& name, const Tensor& filled, const Tensor& sent) {
#ifdef WITH_PROCESS_GROUPS
  if (name.empty()) return false;
  // By name each time: another group may have it after this one is destroyed.
  const auto group = c10d::resolve_process_group(name);
  if (typeid(*group) != typeid(c10d::ProcessGroup)) return false;
  const auto work = asked(*group, filled, sent);
  // On a GPU the stream waits, not the host. There is none where the collective has been put on the current stream.
  if (work) work->wait();
  return true;
#else
  return false;
#endif
}

void call_collective(const Exchange& exchange, const variable_list& tensors) {
  const Tensor &filled = tensors[exchange.filled], sent = exchange.sent < 0 ? Tensor() : tensors[exchange.sent];
  if (exchanged_here(exchange.group, filled, sent)) return;
  pybind11::gil_scoped_acquire gil;
  THPObjectPtr arguments(wrapped(sent.defined() ? variable_list{filled, sent} : variable_list{filled}));
  THPObjectPtr result(PyObject_CallObject(exchange.in_python.object, arguments));
  if (!result) throw_python_error();
}

// Makes the tensors that are not given and launches; false, with nothing done, where the pass is for something else.
bool run(const Pass& pass, variable_list& tensors) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (!suits(pass, tensors)) return false;
  const c10::OptionalDeviceGuard device(tensors[0].device());
  variable_list placed(tensors);
  Tensor& input = placed[0];
  const bool is_copied = !pass.read_strides.empty();
  if (is_copied) input = at::empty_strided(input.sizes(), pass.read_strides, input.options()).copy_(input);
  std::vector<uint64_t> addresses(placed.size());
  uint64_t together = 0;
  for (size_t i = 0; i < placed.size(); ++i) {
    const Part& part = pass.parts[i];
    Tensor& tensor = placed[i];
    if (part.origin != GIVEN) tensor = made(part, input);
    if (part.is_activation && tensor.strides() != input.strides()) tensor = at::empty_like(input).copy_(tensor);
    addresses[i] = tensor.defined() ? reinterpret_cast<uint64_t>(tensor.const_data_ptr()) : 0;
    together |= addresses[i];
  }
  // Kernels were compiled for memory that is aligned to 16 bytes.
  if (together & 15) return false;
  void* stream = current_stream(input.device());
  for (int i = 0; i < static_cast<int>(pass.launches.size()); ++i) {
    if (i == pass.exchange.after) call_collective(pass.exchange, placed);
    const CUresult error = launch(pass, pass.launches[i], stream, addresses);
    // A thread that has not used CUDA yet has no context. Triton's launches give it one.
    if (i == 0 && error == CUDA_ERROR_INVALID_CONTEXT) return false;
    TORCH_CHECK(error == CUDA_SUCCESS, "a launch of a whitening kernel failed: CUDA error ", static_cast<int>(error));
  }
  // What is given stays what it was: autograd knows it, and not a copy of it.
  for (size_t i = 0; i < placed.size(); ++i) {
    const int origin = pass.parts[i].origin;
    if (origin == LIKE_INPUT && is_copied)
      tensors[i] = at::empty_like(tensors[0]).copy_(placed[i]);
    else if (origin != GIVEN)
      tensors[i] = std::move(placed[i]);
  }
  return true;
}

// A training step: both passes, and the backward in Python for what was not recorded, such as a graph of the backward.
struct Step : torch::CustomClassHolder {
  c10::intrusive_ptr<Pass> forward, backward;
  bool relu;
  Held gradients;
};

// Those of the inputs that may have a gradient, by number.
const int INPUTS[] = {forward::INPUT, forward::WEIGHT, forward::BIAS, forward::RESIDUAL};

// The differentiable operation. Its forward has been launched before: this is what its backward needs.
struct Whiten : torch::autograd::Function<Whiten> {
  static Tensor forward(
      AutogradContext* ctx, const Tensor& x, const Optional& weight, const Optional& bias, const Optional&,
      const c10::intrusive_ptr<Step>& step, const variable_list* tensors) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["step"] = c10::IValue::make_capsule(step);
    const Tensor &y = (*tensors)[forward::OUTPUT], &state = (*tensors)[forward::STATE];
    ctx->save_for_backward({x, weight.value_or(Tensor()), bias.value_or(Tensor()), state, step->relu ? y : Tensor()});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    variable_list found(6);
    const Tensor& given = gradients[0];
    if (!given.defined()) return found;
    const auto step = c10::static_intrusive_pointer_cast<Step>(ctx->saved_data["step"].toCapsule());
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &weight = saved[1], &bias = saved[2];
    // Absent tensors are not counted among the inputs.
    bool needs[4];
    size_t input = 0;
    for (int i = 0; i < 4; ++i)
      needs[i] = step->forward->parts[INPUTS[i]].origin == GIVEN && ctx->needs_input_grad(input++);
    variable_list tensors(backward::SIZE);
    tensors[backward::INPUT] = saved[0];
    tensors[backward::GRADIENT] = given;
    tensors[backward::WEIGHT] = weight;
    tensors[backward::STATE] = saved[3];
    tensors[backward::OUTPUT] = saved[4];
    const bool is_transformed =
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
    if (needs[0] && !at::GradMode::is_enabled() && !is_transformed && run(*step->backward, tensors)) {
      found[0] = tensors[backward::D_INPUT];
      if (needs[1]) found[1] = tensors[backward::D_WEIGHT].to(weight.scalar_type());
      if (needs[2]) found[2] = tensors[backward::D_BIAS].to(bias.scalar_type());
      // Without an activation what was added has the gradient of the output.
      if (needs[3]) found[3] = step->relu ? tensors[backward::PASSED] : given;
    } else {
      in_python(*step, given, saved, needs, found);
    }
    return found;
  }

  static void in_python(
      const Step& step, const Tensor& given, const variable_list& saved, const bool* needs, variable_list& found) {
    pybind11::gil_scoped_acquire gil;
    const auto asked = [needs](int i) { return needs[i] ? Py_True : Py_False; };
    THPObjectPtr result(PyObject_CallFunction(
        step.gradients.object, "NNNNNN(OOOO)", wrapped(given), wrapped(saved[0]), wrapped(saved[1]), wrapped(saved[2]),
        wrapped(saved[3]), wrapped(saved[4]), asked(0), asked(1), asked(2), asked(3)));
    if (!result) throw_python_error();
    for (int i = 0; i < 4; ++i) {
      PyObject* item = PyTuple_GetItem(result, i);
      if (item == nullptr) throw_python_error();
      if (item != Py_None) found[i] = THPVariable_Unpack(item);
    }
  }
};

// The passes that an operator of the dispatcher was called for. A pass that is not there is asked for in Python.
struct Operator {
  // Both are called with a tuple of tensors and one of numbers: a pass or None, and the results.
  Held find, compute;
  std::mutex mutex;
  std::vector<std::pair<std::vector<double>, c10::intrusive_ptr<Pass>>> known;

  c10::intrusive_ptr<Pass> pass_for(const std::vector<double>& options, const variable_list& tensors);

  variable_list in_python(const std::vector<double>& options, const variable_list& tensors);
};

const char *const PASS = "iternorm.pass", *const STEP = "iternorm.step", *const REGISTRATION = "iternorm.registration";

template <class T>
const c10::intrusive_ptr<T>& held_by(PyObject* capsule, const char* name) {
  auto* found = static_cast<c10::intrusive_ptr<T>*>(PyCapsule_GetPointer(capsule, name));
  if (found == nullptr) throw python_error();
  return *found;
}

template <class T>
PyObject* capsule_of(c10::intrusive_ptr<T>&& held, const char* name, PyCapsule_Destructor discard) {
  return PyCapsule_New(new c10::intrusive_ptr<T>(std::move(held)), name, discard);
}

// With the GIL.
PyObject* called(PyObject* function, const std::vector<double>& options, const variable_list& tensors) {
  THPObjectPtr numbers(PyTuple_New(options.size()));
  for (size_t i = 0; i < options.size(); ++i) PyTuple_SET_ITEM(numbers.get(), i, PyFloat_FromDouble(options[i]));
  PyObject* result = PyObject_CallFunction(function, "NO", wrapped(tensors), numbers.get());
  if (result == nullptr) throw_python_error();
  return result;
}

c10::intrusive_ptr<Pass> Operator::pass_for(const std::vector<double>& options, const variable_list& tensors) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [asked, pass] : known)
      if (asked == options && suits(*pass, tensors)) return pass;
  }
  c10::intrusive_ptr<Pass> found;
  {
    pybind11::gil_scoped_acquire gil;
    THPObjectPtr result(called(find.object, options, tensors));
    if (result.get() != Py_None) found = held_by<Pass>(result, PASS);
  }
  if (found) {
    std::lock_guard<std::mutex> lock(mutex);
    if (known.size() >= 256) known.clear();
    known.emplace_back(options, found);
  }
  return found;
}

variable_list Operator::in_python(const std::vector<double>& options, const variable_list& tensors) {
  pybind11::gil_scoped_acquire gil;
  THPObjectPtr result(called(compute.object, options, tensors));
  variable_list found;
  for (Py_ssize_t i = 0; i < PyTuple_Size(result); ++i)
    found.push_back(THPVariable_Unpack(PyTuple_GetItem(result, i)));
  return found;
}

// They last as long as the process: a static object would be destroyed after the interpreter.
Operator& forward_operator() {
  static auto* found = new Operator();
  return *found;
}

Operator& backward_operator() {
  static auto* found = new Operator();
  return *found;
}

std::tuple<Tensor, Tensor> fused_forward(
    const Tensor& x, const Optional& weight, const Optional& bias, const Optional& residual, const Optional& mean,
    const Optional& matrix, const Optional& num_batches, std::optional<double> momentum, bool is_covariance,
    int64_t group_size, int64_t num_iters, double eps, bool exact, bool relu) {
  variable_list tensors(forward::SIZE);
  tensors[forward::INPUT] = x;
  tensors[forward::WEIGHT] = weight.value_or(Tensor());
  tensors[forward::BIAS] = bias.value_or(Tensor());
  tensors[forward::RESIDUAL] = residual.value_or(Tensor());
  tensors[forward::MEAN] = mean.value_or(Tensor());
  tensors[forward::MATRIX] = matrix.value_or(Tensor());
  tensors[forward::COUNT] = num_batches.value_or(Tensor());
  const std::vector<double> options = {
      momentum.value_or(-1), double(is_covariance), double(group_size), double(num_iters), eps, double(exact),
      double(relu)};
  Operator& self = forward_operator();
  const auto pass = self.pass_for(options, tensors);
  if (pass && run(*pass, tensors)) return {tensors[forward::OUTPUT], tensors[forward::STATE]};
  const variable_list found = self.in_python(options, tensors);
  return {found[0], found[1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_backward(
    const Tensor& grad, const Optional& more, const Tensor& x, const Optional& weight, const Tensor& state,
    const Optional& output, int64_t group_size, int64_t num_iters, double eps, bool exact, bool needs_input,
    bool needs_residual) {
  variable_list tensors(backward::SIZE);
  tensors[backward::INPUT] = x;
  tensors[backward::GRADIENT] = grad;
  tensors[backward::MORE] = more.value_or(Tensor());
  tensors[backward::WEIGHT] = weight.value_or(Tensor());
  tensors[backward::STATE] = state;
  tensors[backward::OUTPUT] = output.value_or(Tensor());
  const std::vector<double> options = {
      double(group_size), double(num_iters), eps, double(exact), double(needs_input), double(needs_residual)};
  Operator& self = backward_operator();
  const auto pass = self.pass_for(options, tensors);
  if (!pass || !run(*pass, tensors)) {
    const variable_list found = self.in_python(options, tensors);
    return {found[0], found[1], found[2], found[3]};
  }
  // An operator returns tensors: what was not asked for is empty.
  const auto result = [&](int number) {
    return tensors[number].defined() ? tensors[number] : at::empty({0}, state.options());
  };
  return {result(backward::D_INPUT), result(backward::D_WEIGHT), result(backward::D_BIAS), result(backward::PASSED)};
}

// What record.py hands over: function, grid, threads, shared memory, dependent, cooperative, arguments.
Launch launch_from(PyObject* described) {
  Launch launch;
  unsigned long long function;
  int dependent, cooperative;
  PyObject* arguments;
  if (!PyArg_ParseTuple(
          described, "K(II)IIppO!", &function, &launch.grid[0], &launch.grid[1], &launch.threads, &launch.shared,
          &dependent, &cooperative, &PyTuple_Type, &arguments))
    throw python_error();
  launch.function = reinterpret_cast<CUfunction>(function);
  if (dependent) {
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    launch.attributes.push_back(attribute);
  }
  if (cooperative) {
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attribute.value.cooperative = 1;
    launch.attributes.push_back(attribute);
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(arguments); ++i) {
    Argument argument;
    unsigned long long value;
    if (!PyArg_ParseTuple(PyTuple_GetItem(arguments, i), "iK", &argument.tensor, &value)) throw python_error();
    argument.value = value;
    launch.arguments.push_back(argument);
  }
  return launch;
}

// make_pass(launcher, launches, parts, tf32, exchange, read_strides): of each part its origin, its number of elements,
// an example and whether it is an activation; exchange is None, or after how many launches, the numbers of two tensors,
// the name of a process group or None, and what to call in Python; read_strides are empty where nothing is copied.
PyObject* make_pass(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  auto pass = c10::make_intrusive<Pass>();
  unsigned long long launcher;
  PyObject *launches, *parts, *tf32, *exchange, *read_strides;
  if (!PyArg_ParseTuple(
          arguments, "KO!O!OOO!", &launcher, &PyTuple_Type, &launches, &PyTuple_Type, &parts, &tf32, &exchange,
          &PyTuple_Type, &read_strides))
    return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_Size(read_strides); ++i)
    pass->read_strides.push_back(PyLong_AsLongLong(PyTuple_GetItem(read_strides, i)));
  pass->launcher = reinterpret_cast<Launcher>(launcher);
  for (Py_ssize_t i = 0; i < PyTuple_Size(launches); ++i)
    pass->launches.push_back(launch_from(PyTuple_GetItem(launches, i)));
  for (Py_ssize_t i = 0; i < PyTuple_Size(parts); ++i) {
    Part part;
    long long numel;
    PyObject* example;
    int is_activation;
    if (!PyArg_ParseTuple(PyTuple_GetItem(parts, i), "iLOp", &part.origin, &numel, &example, &is_activation))
      return nullptr;
    part.numel = numel, part.is_activation = is_activation;
    if (part.origin == GIVEN) {
      const Tensor& tensor = THPVariable_Unpack(example);
      part.numel = tensor.numel(), part.dtype = tensor.scalar_type();
      if (i == 0) {
        pass->device = tensor.device();
        pass->sizes = tensor.sizes().vec(), pass->strides = tensor.strides().vec();
      }
    }
    pass->parts.push_back(part);
  }
  if (tf32 != Py_None) pass->tf32 = tf32 == Py_True;
  if (exchange != Py_None) {
    Exchange& made = pass->exchange;
    const char* group;
    PyObject* in_python;
    if (!PyArg_ParseTuple(exchange, "iiizO", &made.after, &made.filled, &made.sent, &group, &in_python)) return nullptr;
    if (group != nullptr) made.group = group;
    made.in_python.hold(in_python);
  }
  return capsule_of(std::move(pass), PASS, [](PyObject* capsule) {
    delete static_cast<c10::intrusive_ptr<Pass>*>(PyCapsule_GetPointer(capsule, PASS));
  });
  END_HANDLE_TH_ERRORS
}

// make_step(forward, backward, relu, gradients)
PyObject* make_step(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  auto step = c10::make_intrusive<Step>();
  PyObject *forward, *backward, *gradients;
  int relu;
  if (!PyArg_ParseTuple(arguments, "OOpO", &forward, &backward, &relu, &gradients)) return nullptr;
  step->forward = held_by<Pass>(forward, PASS);
  step->backward = held_by<Pass>(backward, PASS);
  step->relu = relu;
  step->gradients.hold(gradients);
  return capsule_of(std::move(step), STEP, [](PyObject* capsule) {
    delete static_cast<c10::intrusive_ptr<Step>*>(PyCapsule_GetPointer(capsule, STEP));
  });
  END_HANDLE_TH_ERRORS
}

// whiten(step, x, weight, bias, residual, mean, matrix, count): y, or None where the step is for something else.
PyObject* whiten(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const int order[] = {
      forward::INPUT, forward::WEIGHT, forward::BIAS, forward::RESIDUAL, forward::MEAN, forward::MATRIX, forward::COUNT};
  if (count != 8) {
    PyErr_Format(PyExc_TypeError, "whiten takes 8 arguments, got %zd", count);
    return nullptr;
  }
  const auto& step = held_by<Step>(arguments[0], STEP);
  variable_list tensors(forward::SIZE);
  for (int i = 0; i < 7; ++i) {
    PyObject* argument = arguments[1 + i];
    if (argument == Py_None) continue;
    if (!THPVariable_Check(argument)) Py_RETURN_NONE;
    tensors[order[i]] = THPVariable_Unpack(argument);
  }
  Tensor y;
  {
    pybind11::gil_scoped_release no_gil;
    const Tensor x = tensors[forward::INPUT];
    // The backward was recorded with a gradient of the input.
    if ((!at::GradMode::is_enabled() || x.requires_grad()) && run(*step->forward, tensors)) {
      const auto optional = [&](int number) {
        return step->forward->parts[number].origin == GIVEN ? Optional(tensors[number]) : Optional();
      };
      const Optional residual = optional(forward::RESIDUAL);
      y = Whiten::apply(x, optional(forward::WEIGHT), optional(forward::BIAS), residual, step, &tensors);
    }
  }
  return wrapped(y);
  END_HANDLE_TH_ERRORS
}

// register_operators(key, find forward, compute forward, find backward, compute backward): as long as the result lives,
// the operators are computed here for tensors of a dispatch key.
PyObject* register_operators(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char* key;
  PyObject *find_forward, *compute_forward, *find_backward, *compute_backward;
  if (!PyArg_ParseTuple(
          arguments, "sOOOO", &key, &find_forward, &compute_forward, &find_backward, &compute_backward))
    return nullptr;
  forward_operator().find.hold(find_forward);
  forward_operator().compute.hold(compute_forward);
  backward_operator().find.hold(find_backward);
  backward_operator().compute.hold(compute_backward);
  forward_operator().known.clear();
  backward_operator().known.clear();
  auto* library = new torch::Library(
      torch::Library::IMPL, "iternorm", c10::parseDispatchKey(key), __FILE__, __LINE__);
  library->impl("fused_forward", TORCH_FN(fused_forward));
  library->impl("fused_backward", TORCH_FN(fused_backward));
  return PyCapsule_New(library, REGISTRATION, [](PyObject* capsule) {
    delete static_cast<torch::Library*>(PyCapsule_GetPointer(capsule, REGISTRATION));
  });
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"make_pass", make_pass, METH_VARARGS, "A pass from what was recorded of it."},
    {"make_step", make_step, METH_VARARGS, "A training step from its passes."},
    {"whiten", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(whiten)), METH_FASTCALL,
     "The output of a layer in training, or None where the step is for something else."},
    {"register_operators", register_operators, METH_VARARGS, "Compute the operators of compiled graphs here."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "iternorm_step", nullptr, -1, METHODS};

}  // namespace

PyMODINIT_FUNC PyInit_iternorm_step() {
  return PyModule_Create(&MODULE);
}
