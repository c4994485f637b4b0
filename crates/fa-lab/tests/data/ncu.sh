#!/bin/sh
# Answers as Nsight Compute 2025.3 does, in the way that the program which it is to profile is named.
ran() {
    echo "==PROF== Connected to process 1234 (/usr/local/bin/fa)"
    [ "$1" ] && echo "$1"
    echo "==PROF== Disconnected from process 1234"
}
case " $* " in
*" --version "*)
    echo "NVIDIA (R) Nsight Compute Command Line Profiler"
    echo "Copyright (c) 2018-2025 NVIDIA Corporation"
    echo "Version 2025.3.1.0 (build 36398880) (public-release)"
    ;;
*" counted bench "*)
    # As the flags ask for: wide rows, units as they are, one launch of the kernel.
    case " $* " in *" --csv --page raw --print-units base --kernel-name fa_kernel "*) ;; *) exit 1 ;; esac
    ran '==PROF== Profiling "fa_kernel" - 0: 0%....50%....100% - 9 passes'
    echo "B 2 H 8 N 1024 hd 128 causal f16"
    echo '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum","launch__registers_per_thread","sm__maximum_warps_per_active_cycle_pct","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","sm__throughput.avg.pct_of_peak_sustained_elapsed"'
    echo '"","","","","","","","","","","","","register/thread","%","%","%"'
    echo '"0","1234","fa","127.0.0.1","fa_kernel","1","13","(128, 1, 1)","(16, 8, 2)","0","9.0","1,183,744","168","18.75","61.42","n/a"'
    ;;
*" refused bench "*)
    ran "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target device 0. For instructions on enabling permissions and to get more information see https://developer.nvidia.com/ERR_NVGPUCTRPERM"
    echo "==WARNING== No kernels were profiled."
    exit 1
    ;;
*" unknown bench "*)
    ran "==ERROR== Failed to find metric regex:^sm__pipe_none(\\..*)?$"
    exit 1
    ;;
*" failing bench "*)
    ran "==ERROR== The application returned an error code (1)."
    echo "error: no CUDA driver (libcuda) found" >&2
    exit 1
    ;;
*" idle bench "*)
    ran
    echo "==WARNING== No kernels were profiled."
    ;;
esac
