// Gives the made-up GPUs their values: an operator on CUDA tensors computes with torch's kernel for the CPU, on the same
// memory, when the stream's thread comes to it. So the order of streams and events is as real as on a GPU: what is read too
// early is seen as a wrong value.
//
// `operate` stands in for every operator of torch's that has a kernel for CUDA and one for the CPU. On the calling thread
// it finds out the shapes of the results (from the kernel for meta tensors) and allocates them; the rest it queues.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "faults.h"
#include "runtime.h"

namespace {

using c10::IValue;
using torch::jit::Stack;
using Values = std::vector<IValue>;

// Torch's own stay: they allocate, describe memory or copy it with the runtime, and launch no kernel. So do all that return
// views.
const std::unordered_set<std::string> kept = {
    "empty.memory_format", "empty_strided", "set_.source_Tensor", "set_.source_Storage_storage_offset",
    "set_.source_Storage", "set_", "resize_", "_local_scalar_dense", "is_set_to", "record_stream", "_pin_memory",
    "is_pinned", "_copy_from", "_copy_from_and_resize", "_efficientzerotensor", "copy_", "_fused_sdp_choice"};

// They draw random numbers without having a generator among their arguments.
const std::unordered_set<std::string> drawing = {"native_dropout", "_fused_dropout"};

// ---- tensors seen from the CPU and as shapes -------------------------------------------------------------------------

// CPU tensors on the memory of CUDA tensors; those of one storage share one again. It owns nothing: what torch's allocator
// hands out again is used by later work of the same stream only, as on a GPU.
class OnHost {
 public:
  at::Tensor operator()(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    const auto& storage = tensor.storage();
    auto& mine = storages_[storage.data()];
    if (!mine)
      mine = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                          c10::DataPtr(storage.mutable_data(), at::kCPU));
    auto seen = at::empty({0}, at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
    seen.set_(mine, tensor.storage_offset(), tensor.sizes(), tensor.strides());
    mark_number(seen, tensor);
    memory.emplace_back(storage.data(), storage.nbytes());
    return seen;
  }

  static void mark_number(const at::Tensor& to, const at::Tensor& from) {
    if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
  }

  std::vector<std::pair<const void*, size_t>> memory;

 private:
  std::map<const void*, c10::Storage> storages_;
};

at::Tensor as_shape(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto shape = at::empty_strided(tensor.sizes(), tensor.strides(),
                                 at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta));
  OnHost::mark_number(shape, tensor);
  return shape;
}

at::Tensor on_gpu(const at::Tensor& like, c10::Device device) {
  if (!like.defined()) return like;
  return at::empty_strided(like.sizes(), like.strides(), at::TensorOptions().dtype(like.dtype()).device(device));
}

// The same value with `change` made to each tensor in it.
template <class Change>
IValue with_tensors(const IValue& value, Change&& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      list.push_back(each ? std::optional<at::Tensor>(change(*each)) : std::nullopt);
    return list;
  }
  return value;
}

void copy_tensors(const IValue& to, const IValue& from) {
  if (to.isTensor()) {
    // A CPU kernel may leave out what a CUDA kernel would have saved for backward: batch norm, in evaluation.
    const bool some = to.toTensor().defined() && from.toTensor().defined() && from.toTensor().numel();
    if (some) to.toTensor().copy_(from.toTensor());
  } else if (to.isTensorList()) {
    auto into = to.toTensorVector(), out = from.toTensorVector();
    for (size_t i = 0; i < into.size(); i++) into[i].copy_(out[i]);
  }
}

// ---- the stand-in ----------------------------------------------------------------------------------------------------

// A generator of the CPU with a seed from where the GPU's stands, which moves on: the same after the same seed or state.
at::Generator drawn_from(const IValue& given, int device) {
  auto generator = at::cuda::detail::getDefaultCUDAGenerator(static_cast<c10::DeviceIndex>(device));
  if (given.isGenerator() && given.toGenerator().defined()) generator = given.toGenerator();
  if (!generator.device().is_cuda()) return generator;
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto* state = at::check_generator<at::CUDAGeneratorImpl>(generator);
  const uint64_t offset = state->philox_offset_per_thread();
  state->set_philox_offset_per_thread(offset + 4);
  return at::detail::createCPUGenerator(state->current_seed() * 0x9E3779B97F4A7C15ull + offset);
}

c10::Device device_of(const Values& arguments) {
  std::optional<c10::Device> device;
  for (const IValue& each : arguments)
    with_tensors(each, [&](const at::Tensor& tensor) {
      if (!device && tensor.defined() && tensor.is_cuda()) device = tensor.device();
      return tensor;
    });
  for (const IValue& each : arguments)
    if (!device && each.isDevice() && each.toDevice().is_cuda()) device = each.toDevice();
  if (device && device->has_index()) return *device;
  return c10::Device(c10::kCUDA, c10::cuda::current_device());
}

Values call(const c10::OperatorHandle& op, const Values& arguments) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
                                           c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  Stack stack(arguments.begin(), arguments.end());
  op.callBoxed(&stack);
  return Values(stack.begin(), stack.end());
}

// For each result the argument it is, -1 for those that are new.
std::vector<int> written_arguments(const c10::FunctionSchema& schema) {
  std::vector<int> found;
  for (const auto& result : schema.returns()) {
    int which = -1;
    const auto* alias = result.alias_info();
    for (size_t i = 0; alias && alias->isWrite() && i < schema.arguments().size(); i++) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other && other->isWrite() && *other == *alias) which = static_cast<int>(i);
    }
    found.push_back(which);
  }
  return found;
}

// An operator is a launch. Of many tensors it is as many as torch's multi_tensor_apply makes, as MultiTensorApply.cuh has it.
unsigned long launches(const std::string& name, const Values& arguments) {
  if (name.find("foreach") == std::string::npos) return 1;
  static constexpr size_t kMostTensors[] = {770, 448, 336, 252, 210};
  constexpr int64_t kChunk = 65536;
  constexpr size_t kMostBlocks = 2240;
  size_t lists = 0;
  for (const IValue& each : arguments) lists += each.isTensorList();
  if (lists == 0) return 1;
  size_t found = 0, tensors = 0, blocks = 0;
  for (const at::Tensor& tensor : arguments[0].toTensorVector()) {
    tensors++;
    for (int64_t left = tensor.numel(); left > 0; left -= kChunk) {
      const bool last = left <= kChunk;
      blocks++;
      if (blocks < kMostBlocks && !(last && tensors >= kMostTensors[std::min<size_t>(lists, 5) - 1])) continue;
      found++;
      blocks = 0;
      tensors = !last;
    }
  }
  return found + (blocks != 0);
}

// What is read, and what is written, in bytes.
unsigned long moved(const c10::FunctionSchema& schema, const Values& arguments, const Values& results) {
  unsigned long bytes = 0;
  auto add = [&](const IValue& value, unsigned long times) {
    with_tensors(value, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda()) bytes += times * static_cast<unsigned long>(tensor.nbytes());
      return tensor;
    });
  };
  const std::string& name = schema.name();
  bool overwrites = false;
  for (const char* each : {"copy_", "fill_", "zero_"}) overwrites |= name.find(each) != std::string::npos;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool also_read = alias && alias->isWrite() && !schema.arguments()[i].is_out() && !overwrites;
    add(arguments[i], also_read ? 2 : 1);
  }
  for (const IValue& each : results) add(each, 1);
  return bytes;
}

void operate(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Values arguments(stack->end() - static_cast<long>(count), stack->end());
  torch::jit::drop(*stack, count);
  const c10::Device device = device_of(arguments);
  c10::cuda::CUDAGuard guard(device);
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());

  // What the results look like, and out= arguments, which may have to grow.
  const std::vector<int> written = written_arguments(schema);
  bool anew = std::count(written.begin(), written.end(), -1) != 0;
  bool out = false;
  for (const auto& argument : schema.arguments()) out |= argument.is_out();
  Values results(written.size());
  bool known = true;
  if (anew || out) {
    Values shapes;
    for (size_t i = 0; i < count; i++) {
      const bool generator = schema.arguments()[i].name() == "generator";
      shapes.push_back(generator ? IValue() : with_tensors(arguments[i], as_shape));
      if (shapes[i].isDevice()) shapes[i] = c10::Device(at::kMeta);
    }
    try {
      const Values described = call(op, shapes);
      for (size_t i = 0; i < results.size(); i++)
        if (written[i] < 0)
          results[i] = with_tensors(described[i], [&](const at::Tensor& tensor) {
            return tensor.defined() && tensor.is_meta() ? on_gpu(tensor, device) : tensor;
          });
      for (size_t i = 0; i < count; i++) {
        if (!schema.arguments()[i].is_out() || !arguments[i].isTensor()) continue;
        const at::Tensor given = arguments[i].toTensor(), shape = shapes[i].toTensor();
        if (given.is_cuda() && given.sizes() != shape.sizes()) given.resize_(shape.sizes());
      }
    } catch (const c10::Error& error) {
      known = false;  // it depends on values, as for nonzero
    } catch (const std::exception& error) {
      known = false;
    }
  }

  fake::count(fake::Count::launches, launches(schema.name(), arguments));
  fake::count(fake::Count::launched_bytes, moved(schema, arguments, results));

  // What it computes with. Tensors of the CPU are read now, as a launch does.
  OnHost on_host;
  Values inputs;
  for (size_t i = 0; i < count; i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool changed = alias && alias->isWrite();
    inputs.push_back(with_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.is_cuda() || changed) return on_host(tensor);
      auto copied = tensor.clone();
      OnHost::mark_number(copied, tensor);
      return copied;
    }));
    if (inputs[i].isDevice()) inputs[i] = c10::Device(at::kCPU);
    if (schema.arguments()[i].name() == "generator") inputs[i] = drawn_from(arguments[i], device.index());
  }

  if (!known) {  // torch's own kernel would wait for the stream here, too
    stream.synchronize();
    const Values computed = call(op, inputs);
    for (size_t i = 0; i < results.size(); i++)
      if (written[i] < 0)
        results[i] = with_tensors(computed[i], [&](const at::Tensor& tensor) {
          if (!tensor.defined() || !tensor.is_cpu()) return tensor;
          auto made = on_gpu(tensor, device);
          OnHost()(made).copy_(tensor);
          return made;
        });
  } else {
    Values targets(results.size());
    for (size_t i = 0; i < results.size(); i++)
      if (written[i] < 0) targets[i] = with_tensors(results[i], on_host);
    std::optional<uint64_t> seed;
    if (drawing.count(op.operator_name().name.substr(6))) seed = drawn_from(IValue(), device.index()).current_seed();
    auto work = [op, inputs, targets, seed, memory = on_host.memory, index = device.index()] {
      for (const auto& [at, bytes] : memory)
        if (!fake::may_use(index, at, bytes)) return;
      try {
        if (seed) at::manual_seed(*seed);
        const Values computed = call(op, inputs);
        for (size_t i = 0; i < targets.size(); i++)
          if (!targets[i].isNone()) copy_tensors(targets[i], computed[i]);
      } catch (const std::exception& error) {  // as an assertion in a kernel would
        fake::shout("%s: %.400s", op.operator_name().name.c_str(), error.what());
        fake::spoil(index, cudaErrorAssert, "an operator failed");
      }
    };
    C10_CUDA_CHECK(fake::enqueue(stream.stream(), work));
  }
  for (size_t i = 0; i < results.size(); i++)
    stack->push_back(written[i] < 0 ? results[i] : arguments[static_cast<size_t>(written[i])]);
}

// ---- those that need more --------------------------------------------------------------------------------------------

void queue_operator(const char* name, Stack stack) {
  operate(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), &stack);
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense();
}

// What `later` is given from now on waits for what `earlier` has.
void order(const c10::cuda::CUDAStream& earlier, const c10::cuda::CUDAStream& later) {
  cudaEvent_t event = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  C10_CUDA_CHECK(cudaEventRecord(event, earlier));
  C10_CUDA_CHECK(cudaStreamWaitEvent(later, event, 0));
  C10_CUDA_CHECK(cudaEventDestroy(event));
}

// Copies of one layout the runtime does by itself. From host to device others go through a second tensor on the device, the
// other way through one on the host: as torch does it.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const at::Tensor from = source.expand_as(self);
  if (self.is_cuda() && from.is_cuda() && self.device() == from.device()) {
    queue_operator("aten::copy_", {self, from, non_blocking});
    return self;
  }
  const auto device = from.is_cuda() ? from.device() : self.device();
  c10::cuda::CUDAGuard guard(device);
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  if (!same_layout(self, from)) {
    if (from.is_cuda() && !self.is_cuda()) {
      auto dense = at::empty(self.sizes(), from.options().memory_format(at::MemoryFormat::Contiguous));
      queue_operator("aten::copy_", {dense, from, false});
      auto host = at::empty(self.sizes(), dense.options().device(at::kCPU));
      copy(host, dense, false);
      self.copy_(host);
    } else {
      auto dense = at::empty(self.sizes(), from.options().device(self.device()).memory_format(at::MemoryFormat::Contiguous));
      auto plain = from.contiguous();
      copy(dense, plain, non_blocking);
      queue_operator("aten::copy_", {self, dense, non_blocking});
    }
    return self;
  }
  if (self.is_cuda() && from.is_cuda()) {  // from one GPU to the other: each waits for the other's stream
    const auto there = c10::cuda::getCurrentCUDAStream(self.device().index());
    order(there, stream);
    C10_CUDA_CHECK(cudaMemcpyAsync(self.mutable_data_ptr(), from.const_data_ptr(), self.nbytes(), cudaMemcpyDefault, stream));
    order(stream, there);
    return self;
  }
  C10_CUDA_CHECK(cudaMemcpyAsync(self.mutable_data_ptr(), from.const_data_ptr(), self.nbytes(), cudaMemcpyDefault, stream));
  if (!non_blocking) C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  return self;
}

// The parts of SyncBatchNorm, which only CUDA has. All but the channels, dimension 1, are reduced.
std::vector<int64_t> all_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); dim++) dims.push_back(dim);
  return dims;
}

at::Tensor per_channel(const at::Tensor& values, const at::Tensor& like) {
  std::vector<int64_t> shape(static_cast<size_t>(like.dim()), 1);
  shape[1] = -1;
  return values.view(shape);
}

std::tuple<at::Tensor, at::Tensor> batch_norm_stats(const at::Tensor& input, double eps) {
  const auto wide = input.to(at::kFloat);
  const auto variance = at::var(wide, all_but_channels(input), /*unbiased=*/false);
  return {at::mean(wide, all_but_channels(input)), at::rsqrt(variance + eps)};
}

std::tuple<at::Tensor, at::Tensor> batch_norm_gather_stats_with_counts(
    const at::Tensor&, const at::Tensor& means, const at::Tensor& invstds, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, double momentum, double eps, const at::Tensor& counts) {
  const auto weights = (counts / counts.sum()).view({-1, 1});
  const auto mean = (means * weights).sum(0);
  const auto squares = invstds.reciprocal().square() - eps + (means - mean).square();
  const auto variance = (squares * weights).sum(0);
  if (running_mean && running_mean->defined()) running_mean->mul_(1 - momentum).add_(mean, momentum);
  if (running_var && running_var->defined()) {
    const auto total = counts.sum();
    running_var->mul_(1 - momentum).add_(variance * (total / (total - 1)), momentum);
  }
  return {mean, at::rsqrt(variance + eps)};
}

at::Tensor batch_norm_elemt(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const at::Tensor& mean, const at::Tensor& invstd,
                            double) {
  auto result = (input - per_channel(mean, input)) * per_channel(invstd, input);
  if (weight && weight->defined()) result = result * per_channel(*weight, input);
  if (bias && bias->defined()) result = result + per_channel(*bias, input);
  return result.to(input.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_reduce(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd,
    const std::optional<at::Tensor>&, bool input_g, bool weight_g, bool bias_g) {
  const auto dims = all_but_channels(input);
  const auto sum = gradient.sum(dims);
  const auto product = (gradient * (input - per_channel(mean, input))).sum(dims);
  return {input_g ? sum : at::Tensor(), input_g ? product : at::Tensor(), weight_g ? product * invstd : at::Tensor(),
          bias_g ? sum.clone() : at::Tensor()};
}

at::Tensor batch_norm_backward_elemt(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean,
                                     const at::Tensor& invstd, const std::optional<at::Tensor>& weight,
                                     const at::Tensor& sum, const at::Tensor& product, const at::Tensor& counts) {
  const auto total = counts.sum();
  const auto correction = (input - per_channel(mean, input)) * per_channel(invstd.square() * product / total, input);
  auto factor = invstd;
  if (weight && weight->defined()) factor = factor * *weight;
  return (gradient - per_channel(sum / total, input) - correction) * per_channel(factor, input);
}

}  // namespace

// Called once torch has been imported. Returns how many operators it stands in for.
CUDA_API int fake_cuda_install() {
  class Silent : public c10::WarningHandler {  // torch warns that a kernel is replaced
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  auto& library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int installed = 0;
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const std::string local = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) || kept.count(local)) continue;
    bool view = false;
    for (const auto& result : op->schema().returns()) view |= result.alias_info() && !result.alias_info()->isWrite();
    if (view) continue;
    library.impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&operate>());
    installed++;
  }
  for (const char* each : {"convolution", "convolution_backward"})
    library.impl(each, torch::CppFunction::makeFromBoxedFunction<&operate>());
  library.impl("copy_", copy);
  library.impl("batch_norm_stats", batch_norm_stats);
  library.impl("batch_norm_gather_stats_with_counts", batch_norm_gather_stats_with_counts);
  library.impl("batch_norm_elemt", batch_norm_elemt);
  library.impl("batch_norm_backward_reduce", batch_norm_backward_reduce);
  library.impl("batch_norm_backward_elemt", batch_norm_backward_elemt);
  return installed;
}
