// Answers for OpenVINO which instructions the CPU has, when it is preloaded: those of AVX2.
//
// OpenVINO's CPU plugin asks these functions of libopenvino before it chooses its own kernels. oneDNN, inside
// that plugin, reads ONEDNN_MAX_CPU_ISA instead.

namespace ov {

bool with_cpu_x86_bfloat16() { return false; }
bool with_cpu_x86_avx2_vnni() { return false; }
bool with_cpu_x86_avx2_vnni_2() { return false; }
bool with_cpu_x86_avx512f() { return false; }
bool with_cpu_x86_avx512_core() { return false; }
bool with_cpu_x86_avx512_core_vnni() { return false; }
bool with_cpu_x86_avx512_core_fp16() { return false; }
bool with_cpu_x86_avx512_core_amx() { return false; }
bool with_cpu_x86_avx512_core_amx_fp16() { return false; }
bool with_cpu_x86_avx512_core_amx_bf16() { return false; }
bool with_cpu_x86_avx512_core_amx_int8() { return false; }

}  // namespace ov
