/* The peer of `cargo xtask bench collectives`: MPI's collectives.
 *
 *   mpicc -O2 collectives.c -o collectives-mpi
 *   mpirun -n RANKS collectives-mpi CORES WARMUP OPERATIONS SIZE:ITERATIONS...
 *
 * CORES and OPERATIONS are lists with commas; ranks are held on the cores in turn. SIZE is the bytes of
 * the whole vector. Rank 0 prints a JSON object per operation and size. */

#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Holds this process on element `rank` (modulo its length) of the list. */
static void hold(const char *cores, int rank) {
    int all[1024], count = 0;
    char *list = strdup(cores);
    for (char *core = strtok(list, ","); core && count < 1024; core = strtok(NULL, ",")) {
        all[count++] = atoi(core);
    }
    free(list);
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(all[rank % count], &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) {
        perror("sched_setaffinity");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static void run(const char *operation, const float *in, float *out, int numbers, int ranks) {
    int part = numbers / ranks;
    if (strcmp(operation, "all_reduce") == 0) {
        MPI_Allreduce(in, out, numbers, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (strcmp(operation, "all_gather") == 0) {
        MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
    } else if (strcmp(operation, "reduce_scatter") == 0) {
        MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (strcmp(operation, "all_to_all") == 0) {
        MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
    } else {
        fprintf(stderr, "error: unknown operation %s\n", operation);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
}

static void measure(const char *operation, long bytes, int iterations, int warmup, int rank, int ranks) {
    int numbers = (int)(bytes / (long)sizeof(float));
    float *in = malloc((size_t)bytes), *out = malloc((size_t)bytes);
    if (!in || !out) {
        fprintf(stderr, "error: no memory for %ld bytes\n", bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    for (int i = 0; i < numbers; i++) {
        in[i] = 1.0f;
        out[i] = 0.0f;
    }
    for (int i = 0; i <= warmup; i++) {
        run(operation, in, out, numbers, ranks);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    for (int i = 0; i < iterations; i++) {
        run(operation, in, out, numbers, ranks);
    }
    double seconds = (MPI_Wtime() - began) / iterations;
    if (rank == 0) {
        printf("{\"operation\": \"%s\", \"bytes\": %ld, \"seconds\": %.9f}\n", operation, bytes, seconds);
        fflush(stdout);
    }
    free(in);
    free(out);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 5) {
        fprintf(stderr, "error: CORES WARMUP OPERATIONS SIZE:ITERATIONS...\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    hold(argv[1], rank);
    int warmup = atoi(argv[2]);
    char *rest = NULL;
    for (char *name = strtok_r(argv[3], ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        for (int i = 4; i < argc; i++) {
            long bytes;
            int iterations;
            if (sscanf(argv[i], "%ld:%d", &bytes, &iterations) != 2) {
                fprintf(stderr, "error: SIZE:ITERATIONS is %s\n", argv[i]);
                MPI_Abort(MPI_COMM_WORLD, 2);
            }
            measure(name, bytes, iterations, warmup, rank, ranks);
        }
    }
    MPI_Finalize();
    return 0;
}
