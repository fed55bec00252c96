// Loads a package of AOTInductor, runs it on the tensors in a file, and writes the results to another file.
//   serve PACKAGE INPUTS RESULTS      both files are lists of tensors, as torch.save writes them

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

static std::vector<char> read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

int main(int, char** argv) {
    c10::InferenceMode mode;
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const c10::IValue saved = torch::pickle_load(read(argv[2]));
    std::vector<at::Tensor> inputs;
    for (const c10::IValue& input : saved.toListRef()) {
        inputs.push_back(input.toTensor());
    }
    std::vector<at::Tensor> results = model.run(inputs);
    std::vector<char> bytes = torch::pickle_save(results);
    std::ofstream(argv[3], std::ios::binary).write(bytes.data(), bytes.size());
}
