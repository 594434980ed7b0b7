// One right kernel and one with a single fault for each of compute-sanitizer's tools, to show that the tool sees it.
// Each runs as one block of 64 threads over a buffer of 128 floats that nothing has written.

extern "C" __global__ void treemla_fault_none(float* data) {
  __shared__ float passed[64];
  passed[threadIdx.x] = float(threadIdx.x);
  __syncthreads();
  data[threadIdx.x] = passed[63 - threadIdx.x];
}

// racecheck: the barrier between writing and reading another warp's element is missing.
extern "C" __global__ void treemla_fault_race(float* data) {
  __shared__ volatile float passed[64];
  passed[threadIdx.x] = float(threadIdx.x);
  data[threadIdx.x] = passed[63 - threadIdx.x];
}

// initcheck: the upper half of the buffer was never written.
extern "C" __global__ void treemla_fault_uninitialised(float* data) { data[threadIdx.x] = data[threadIdx.x + 64] + 1.f; }

// memcheck: the first element behind the buffer, and more.
extern "C" __global__ void treemla_fault_out_of_bounds(float* data) { data[threadIdx.x] = data[threadIdx.x + 128] + 1.f; }

// synccheck: lane 16 waits for lanes 0..15, a set that it does not belong to.
extern "C" __global__ void treemla_fault_barrier(float* data) {
  const unsigned members = __ballot_sync(0xffffffffu, threadIdx.x % 32 < 16);
  if (threadIdx.x % 32 <= 16) {
    data[threadIdx.x] = 0.f;
    __syncwarp(members);
  }
}
