// A device guard for "cuda" on a torch without CUDA: current device and streams of each thread, and events.
//
// torch's C++ asks the guard of a device type for its current stream when a tensor enters an autograd graph, and autograd's
// engine sets streams, records and waits for events through it. This guard reports them to Python.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <new>

namespace {

using namespace c10;

constexpr int kDevices = 8;

thread_local DeviceIndex device_in_use = 0;
thread_local int64_t streams_in_use[kDevices] = {};

using Callback = void (*)(int64_t event, int64_t device, int64_t stream);
Callback on_record = nullptr;
Callback on_block = nullptr;
int64_t next_event = 0;
int64_t next_stream = 0;

struct VirtualGuard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, device_in_use); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) device_in_use = device.index();
  }
  Stream getStream(Device device) const override { return stream(device, streams_in_use[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int priority = 0) const override { return stream(device, ++next_stream); }
  Stream exchangeStream(Stream to) const override {
    Stream before = getStream(to.device());
    streams_in_use[index(to.device())] = to.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(++next_event);
    if (on_record) on_record(reinterpret_cast<int64_t>(*event), stream.device_index(), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (on_block && event) on_block(reinterpret_cast<int64_t>(event), stream.device_index(), stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

 private:
  static int index(Device device) { return device.index() < 0 ? device_in_use : device.index(); }
  static Stream stream(Device device, int64_t id) {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, static_cast<DeviceIndex>(index(device))), id);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, VirtualGuard);

// The object that at::getAccelerator queries. It exists already in torch, so it is replaced in place.
// Without `override`, because not every release of torch has all of these methods.
struct VirtualHooks final : at::CUDAHooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasCUDA() const { return true; }
  DeviceIndex deviceCount() const { return kDevices; }
  DeviceIndex getCurrentDevice() const { return device_in_use; }
  void setCurrentDevice(DeviceIndex device) const { device_in_use = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const {
    DeviceIndex before = device_in_use;
    if (device >= 0) device_in_use = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const { return exchangeDevice(device); }
  bool hasPrimaryContext(DeviceIndex) const { return true; }
};

static_assert(sizeof(VirtualHooks) == sizeof(at::CUDAHooksInterface));

}  // namespace

extern "C" {
void virtual_gpu_set_available(int64_t value) {
  void* hooks = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  if (value) {
    new (hooks) VirtualHooks();
  } else {
    new (hooks) at::CUDAHooksInterface();
  }
}
int64_t virtual_gpu_devices() { return kDevices; }
int64_t virtual_gpu_device() { return device_in_use; }
void virtual_gpu_set_device(int64_t device) { device_in_use = static_cast<c10::DeviceIndex>(device); }
int64_t virtual_gpu_stream(int64_t device) { return streams_in_use[device]; }
void virtual_gpu_set_stream(int64_t device, int64_t stream) { streams_in_use[device] = stream; }
int64_t virtual_gpu_new_stream() { return ++next_stream; }
int64_t virtual_gpu_new_event() { return ++next_event; }
void virtual_gpu_listen(Callback record, Callback block) {
  on_record = record;
  on_block = block;
}
}
