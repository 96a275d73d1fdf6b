// A device for tests, in the machine's own memory, as one of Paddle's plug-ins: operations without a kernel for it, which
// are all, run on the CPU. FAKE_DEVICE is its name, FAKE_COUNT how many there are, FAKE_BFLOAT16=0 refuses bfloat16.
#include <cstdlib>
#include <cstring>

#include "paddle/phi/backends/device_ext.h"

namespace {
const char *read(const char *name, const char *usual) {
  const char *value = std::getenv(name);
  return value ? value : usual;
}
size_t allocated = 0;
thread_local int current = 0;

C_Status none() { return C_SUCCESS; }
C_Status on_device(const C_Device) { return C_SUCCESS; }
C_Status count(size_t *number) { *number = std::atoi(read("FAKE_COUNT", "2")); return C_SUCCESS; }
C_Status list(size_t *devices) {
  for (int i = 0, n = std::atoi(read("FAKE_COUNT", "2")); i < n; ++i) devices[i] = i;
  return C_SUCCESS;
}
C_Status allocate(const C_Device, void **pointer, size_t size) {
  *pointer = std::malloc(size);
  allocated += size;
  return *pointer ? C_SUCCESS : C_FAILED;
}
C_Status release(const C_Device, void *pointer, size_t size) {
  std::free(pointer);
  allocated -= size;
  return C_SUCCESS;
}
C_Status set(const C_Device, void *pointer, unsigned char value, size_t size) {
  std::memset(pointer, value, size);
  return C_SUCCESS;
}
C_Status copy(const C_Device, void *to, const void *from, size_t size) { std::memcpy(to, from, size); return C_SUCCESS; }
C_Status copy_between(const C_Device, const C_Device, void *to, const void *from, size_t size) {
  std::memcpy(to, from, size);
  return C_SUCCESS;
}
C_Status copy_async(const C_Device, C_Stream, void *to, const void *from, size_t size) {
  std::memcpy(to, from, size);
  return C_SUCCESS;
}
C_Status make_stream(const C_Device, C_Stream *stream) { *stream = nullptr; return C_SUCCESS; }
C_Status on_stream(const C_Device, C_Stream) { return C_SUCCESS; }
C_Status call(const C_Device device, C_Stream stream, C_Callback callback, void *data) {
  C_Status status;
  callback(device, stream, data, &status);
  return status;
}
C_Status make_event(const C_Device, C_Event *event) { *event = nullptr; return C_SUCCESS; }
C_Status on_event(const C_Device, C_Event) { return C_SUCCESS; }
C_Status on_both(const C_Device, C_Stream, C_Event) { return C_SUCCESS; }
C_Status memory(const C_Device, size_t *total, size_t *free) {
  *total = size_t(4) << 30;
  *free = *total - allocated;
  return C_SUCCESS;
}
C_Status chunk(const C_Device, size_t *size) { *size = 64; return C_SUCCESS; }
C_Status bfloat16(const C_Device, bool *supported) {
  *supported = std::strcmp(read("FAKE_BFLOAT16", "1"), "0") != 0;
  return C_SUCCESS;
}
C_Status float16(const C_Device, bool *supported) { *supported = true; return C_SUCCESS; }
C_Status capability(const C_Device, size_t *value) { *value = 1; return C_SUCCESS; }
}  // namespace

extern "C" void InitPlugin(CustomRuntimeParams *params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char *>(read("FAKE_DEVICE", "npu"));
  params->sub_device_type = const_cast<char *>("V0.1");
  C_DeviceInterface *api = params->interface;
  std::memset(reinterpret_cast<char *>(api), 0, sizeof(C_DeviceInterface));
  api->size = sizeof(C_DeviceInterface);
  api->initialize = none;
  api->finalize = none;
  api->init_device = api->deinit_device = api->synchronize_device = on_device;
  api->set_device = [](const C_Device device) { current = device->id; return C_SUCCESS; };
  api->get_device = [](const C_Device device) { device->id = current; return C_SUCCESS; };
  api->create_stream = make_stream;
  api->destroy_stream = api->query_stream = api->synchronize_stream = on_stream;
  api->stream_add_callback = call;
  api->create_event = make_event;
  api->destroy_event = api->query_event = api->synchronize_event = on_event;
  api->record_event = on_both;
  api->stream_wait_event = on_both;
  api->device_memory_allocate = api->host_memory_allocate = api->unified_memory_allocate = allocate;
  api->device_memory_deallocate = api->host_memory_deallocate = api->unified_memory_deallocate = release;
  api->device_memory_set = set;
  api->memory_copy_h2d = api->memory_copy_d2h = api->memory_copy_d2d = copy;
  api->memory_copy_p2p = copy_between;
  api->async_memory_copy_h2d = api->async_memory_copy_d2h = api->async_memory_copy_d2d = copy_async;
  api->get_device_count = count;
  api->get_device_list = list;
  api->device_memory_stats = memory;
  api->device_min_chunk_size = chunk;
  api->is_bfloat16_supported = bfloat16;
  api->is_float16_supported = float16;
  api->get_compute_capability = api->get_runtime_version = api->get_driver_version = capability;
}
